"""What other programs have written, by what is in its place."""

from pathlib import Path

from lingua.app import App
from lingua.checkpoint.origin import PEFT_CONFIG, is_hf_folder
from lingua.checkpoint.source import TensorSource
from lingua.tools.exchange.adapters import open_peft
from lingua.tools.exchange.hugging_face import form_of, open_folder
from lingua.tools.exchange.meta_lingua import open_meta_lingua


def open_foreign(path: Path, app: App | None, base: str | None) -> TensorSource:
    """Open a folder of transformers or of PEFT, whose base may be at `base`, or what Meta Lingua or
    torch.save wrote. `app` is as in lingua.checkpoint.origin.open_source. By one process, or each
    by itself. Raises UserError, or what reading a damaged file raises."""
    if (path / PEFT_CONFIG).is_file():
        return open_peft(path, app, base)
    if is_hf_folder(path):
        return open_folder(form_of(app, path), path)[0]
    return open_meta_lingua(path)
