"""Baton: prefill and decode on different workers, with the same tokens on any topology."""
