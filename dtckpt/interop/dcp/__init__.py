"""The plug-in for `torch.distributed.checkpoint` (DCP), whose ``save`` and ``load`` then use checkpoints of ours.

::

    state dict ---DCP's planner---> items by key ---`storage_writer`---> chunks, state tree, manifest, commit
    state dict <--DCP's planner---  items by key <--`storage_reader`---  regions, plain values

DCP's own collectives carry everything that its ranks tell each other: plans (`save_operation`), results, errors. The
plug-in opens no other connection. `columns` keeps these messages short.
"""
