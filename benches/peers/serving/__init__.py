"""The parts of `serve.py`: engines, their client, the machine, models, measures and tables."""
