"""The formats of other libraries: how their files are recognized, read and planned.

``pickle_*`` and ``pickled_*`` read pickles without running them; ``pickle_names`` has the names that are allowed.
``torch_*`` read files of ``torch.save``, ``dcp_*`` checkpoints of ``torch.distributed.checkpoint``, and
``safetensors_*`` files of Hugging Face. Each format becomes one `dtckpt.checkpoint.reading.pieces.PieceIndex`, which
`piece_files` reads. The modules ``*_plan`` lay out new files.
"""
