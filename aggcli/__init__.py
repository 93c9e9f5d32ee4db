"""How is the per-token policy loss averaged, and did my parallel layout change it?"""

__version__ = "0.1.0"
