"""Watching a run: what each step's exchange takes, sends and loses, measured in the graph, and the files it goes to."""
