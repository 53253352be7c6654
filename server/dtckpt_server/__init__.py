"""The coordinator of dtckpt: which clients of a job are alive and have arrived at which barrier, and the verdicts.

`rules` decides, and is pure. `service` translates gRPC calls into its events. `server` opens ports, and `main` is the
command.
"""
