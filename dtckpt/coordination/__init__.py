"""Who is in the job, and barriers: through the coordinator, through a torch.distributed store, or alone."""
