"""A fork that looks into the model, every `probe.every` steps: by layer, the root mean square of
what it returns, over the rows of the global batch, and the norm of its gradients."""

from dataclasses import replace

from apps.main import app as main_app
from lingua.monitor.means import Means
from lingua.run.run import Run


def probe(run: Run) -> None:
    squares = Means()
    for micro, states in run.hidden("layers.*"):
        by_row = {name: x.float().square().mean((1, 2)) for name, x in states.items()}
        squares.add(by_row, micro)
    rms = {name: mean**0.5 for name, mean in squares.read(run.mesh).items()}
    norms = run.grad_norms("layers.*")
    run.report.event("layers", run.progress.step + 1, rms=rms, norms=norms)


app = replace(main_app, path=__name__, probe=probe)
