"""Generate text from a checkpoint of this app, as apps.main.generate does."""

from apps.main import generate as app
from apps.mtp.model import ModelArgs, build_trained
from lingua.parallel.program import run_program

if __name__ == "__main__":
    run_program(lambda: app.main(None, ModelArgs, build_trained))
