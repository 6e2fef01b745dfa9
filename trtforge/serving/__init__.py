"""Models that serve: a Triton repository, the server that proves it, and the files that deploy it."""
