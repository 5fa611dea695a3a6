"""Checkpoints that are whole or do not exist, and load on any topology.

`folder` defines a checkpoint; `save` and `saver` make one, `retention` removes old ones. `source`
finds and reads tensors, of other programs too, `dcp` those of one folder. `resume` decides what a
run starts from, and what may differ from what was saved.

    python -m lingua.checkpoint --help     to look at checkpoints from outside a run
"""
