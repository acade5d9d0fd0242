"""Monitoring: measures in the graph what each step's exchange takes, sends and loses, and writes it to files."""
