"""The configuration of the optimizer and of the learning rate."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from lingua.config.schema import Announced, Guarded, bounds, require


@dataclass
class MuonArgs:
    momentum: Announced[float] = 0.95  # decay per update of the mean of the gradient
    nesterov: Announced[bool] = True  # the mean looks one update ahead
    ns_steps: Announced[int] = 5  # Newton-Schulz iterations that make an update orthogonal
    # root mean square of an update's elements at learning rate 1; AdamW's is about 0.2
    rms: Announced[float] = 0.2
    dtype: Announced[Literal["bf16", "fp32"]] = "bf16"  # for the iterations; the mean stays float32

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "ns_steps", maximum=1000)
        yield from require(self, "at least 0 and below 1", lambda v: 0 <= v < 1, "momentum")
        yield from require(self, "above 0 and finite", lambda v: 0 < v < math.inf, "rms")


@dataclass
class OptimArgs:
    # `muon`: Muon for the matrices inside the blocks, AdamW for the rest (embedding, head, norms)
    name: Guarded[Literal["adamw", "muon"]] = "adamw"
    lr: Announced[float] = 3e-4  # peak learning rate
    # multiplies the rate of the parameters or modules that a name matches, in which `*` is one part
    # (`layers.*.attention`); several that match are multiplied
    lr_scale: Announced[dict[str, float]] = field(default_factory=dict)
    # decoupled, times the learning rate; on matrices only, not on embeddings, norms and biases
    weight_decay: Announced[float] = 0.1
    beta1: Announced[float] = 0.9  # AdamW: decay per update of the mean of the gradient
    beta2: Announced[float] = 0.95  # AdamW: decay per update of the mean of the squared gradient
    epsilon: Announced[float] = 1e-8  # AdamW: added to the root of the second moment
    muon: MuonArgs = field(default_factory=MuonArgs)  # with `name: muon`; lr and decay are shared
    clip: Announced[float] = 1.0  # largest global norm of the gradient; .inf: no clipping
    # how the rate goes on after the warmup
    scheduler: Announced[Literal["constant", "linear", "inv_sqrt", "cosine", "wsd"]] = "cosine"
    warmup: Announced[int] = 2000  # updates of linear rise; the last of them has the peak rate
    lr_min_ratio: Announced[float] = 0.1  # lowest rate of the decay, as a share of the peak
    # cosine, wsd: length of a cycle as a share of the run; each starts again from the peak
    cycle_length: Announced[float] = 1.0
    # cosine: progress is raised to this power; > 1 decays later
    cosine_theta: Announced[float] = 1.0
    # wsd: the decay that ends a cycle, as a share of the updates from the start of the run to there
    decay_fraction: Announced[float] = 0.1
    # power of the decay: inv_sqrt (warmup/step)^p, wsd 1 - progress^p
    exp_factor: Announced[float] = 0.5
    # a gradient that is not finite changes nothing; then: stop the run, or count it and go on
    on_nonfinite: Announced[Literal["stop", "skip"]] = "stop"

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 0, "warmup")
        yield from bounds(self, 0, "lr_min_ratio", "decay_fraction", maximum=1)
        if not all(0 <= scale < math.inf for scale in self.lr_scale.values()):
            yield "lr_scale", "must map names to numbers of at least 0"
        not_negative, positive = ("lr", "weight_decay"), ("epsilon", "cycle_length", "cosine_theta")
        yield from require(self, "at least 0", lambda v: 0 <= v < math.inf, *not_negative)
        yield from require(self, "at least 0 and below 1", lambda v: 0 <= v < 1, "beta1", "beta2")
        yield from require(self, "above 0", lambda v: 0 < v < math.inf, *positive, "exp_factor")
        yield from require(self, "above 0 (.inf: no clipping)", lambda v: v > 0, "clip")
