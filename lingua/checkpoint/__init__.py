"""Checkpoints that are whole or do not exist, and load on any topology.

`folder` defines a checkpoint; `save`, `write` and `saver` make one, `retention` removes old ones.
`source` finds and reads tensors, of other programs too, `dcp` those of one folder. `resume` decides
what may differ from what was saved, and `origin` what a new run takes from another.

    python -m lingua.checkpoint --help     to look at checkpoints from outside a run
"""
