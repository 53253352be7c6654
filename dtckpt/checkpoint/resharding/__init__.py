"""Offline resharding: a checkpoint laid out anew for another mesh, without the job that saved it."""
