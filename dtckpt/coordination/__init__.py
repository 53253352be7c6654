"""The clients of a job and their barriers: through the coordinator, through a torch.distributed store, or alone."""
