from tests.worker_pair_cases import alone, make_pair, tiny_model

__all__ = ["alone", "make_pair", "tiny_model"]
