"""The cache with which a model generates text."""

from collections import Counter

from torch import Tensor, nn


class Cache:
    """Keeps what the layers of a model need of earlier columns while it generates a batch of texts.

    A column is one token of every row. The rows end together; a shorter row begins with padding,
    which its text must not see. Before each forward the caller gives the column at which its tokens
    begin: with tp ranks, which share the columns of a forward, the last columns are run again
    together with the new one. So a layer keeps values of every column (`extend`), or of the one
    from which the next forward continues (`keep`). A layer that is called several times in a
    forward keeps the values of each call apart.
    """

    def __init__(self, padding: Tensor, size: int, overlap: int) -> None:
        """padding: int64 B, columns before the first token of each row; size: columns at most;
        overlap: the last columns of a forward that the next one runs again."""
        self.padding, self.size, self.overlap = padding, size, overlap
        self.longest_padding = int(padding.max())
        # By layer, and how often it was called before in a forward.
        self._columns: dict[tuple[nn.Module, int], list[Tensor]] = {}
        self._last: dict[tuple[nn.Module, int], tuple[Tensor, ...]] = {}
        self.start_forward(0)

    def start_forward(self, begin: int) -> None:
        """Called before each forward: its tokens are the columns from `begin` on."""
        self.begin = begin
        self._calls: Counter[nn.Module] = Counter()

    def extend(self, layer: nn.Module, *values: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Keep a layer's values of this forward's columns, which lie along `dim`; dim 0 is the
        rows. Returns those of all columns up to the last one of this forward. Called once in each
        call of the layer."""
        key = self._key_of_call(layer)
        if key not in self._columns:
            shapes = ((*v.shape[:dim], self.size, *v.shape[dim + 1 :]) for v in values)
            buffers = [v.new_empty(shape) for v, shape in zip(values, shapes, strict=True)]
            self._columns[key] = buffers
        n_columns = values[0].shape[dim]
        for buffer, new in zip(self._columns[key], values, strict=True):
            buffer.narrow(dim, self.begin, n_columns).copy_(new)
        return tuple(b.narrow(dim, 0, self.begin + n_columns) for b in self._columns[key])

    def keep(self, layer: nn.Module, *values: Tensor) -> None:
        """Keep a layer's values, dim 0 the rows, of the column before the next forward's: this
        forward's column `-1 - overlap`. Called once in each call of the layer."""
        self._last[self._key_of_call(layer)] = tuple(v.clone() for v in values)

    def last(self, layer: nn.Module) -> tuple[Tensor, ...] | None:
        """The values of column `begin - 1`, which a layer kept in the forward before; None where
        there is no such column. Called before `keep`."""
        return self._last.get((layer, self._calls[layer]))

    def _key_of_call(self, layer: nn.Module) -> tuple[nn.Module, int]:
        self._calls[layer] += 1
        return layer, self._calls[layer] - 1
