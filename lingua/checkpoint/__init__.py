"""Checkpoints that are whole or not there, and load on any topology.

`folder` says what a checkpoint is, `save` and `write` make one, `load` reads its tensors, `resume`
says what may differ from what was saved, `retention` what is kept, `saver` is a run's saves.

    python -m lingua.checkpoint --help     to look at checkpoints from outside a run
"""
