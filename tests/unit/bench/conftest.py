from tests.forked_ranks import ranks_are_forked

__all__ = ["ranks_are_forked"]
