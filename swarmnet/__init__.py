"""swarmnet: decentralized pipeline, data, tensor and ZeRO parallel training."""

__version__ = "0.1.0"
