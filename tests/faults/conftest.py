from tests.replicas import replicas

__all__ = ["replicas"]
