from tests.tiny_models import tiny_model
from tests.worker_pair_cases import alone, make_pair

__all__ = ["alone", "make_pair", "tiny_model"]
