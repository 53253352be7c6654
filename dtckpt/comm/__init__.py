"""Communication between clients: process groups, messages, collectives; and this process: threads, forks, memory."""
