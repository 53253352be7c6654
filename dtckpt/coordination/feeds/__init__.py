"""Feeds: jobs publish versions of their weights, other jobs lease them; pure rules, tickets, and the client.

A *feed* is a name under which one job publishes *versions*. Each client of the job has one *part* of a version in its
memory, and a reader takes a *lease* before it reads the parts. The *registry* keeps only which client has which part,
and which clients read; no bytes of weights go through it. ``rules`` decides (pure). The coordinator runs it for all
jobs, and a publisher without a coordinator may run it for its readers.
"""
