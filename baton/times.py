"""What work has taken: workers measure it, the router predicts from it."""

import msgspec

from baton.wire_types import Attempt, Count, Id, Seconds


class PrefillTimes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a prompt has taken where it was computed."""

    request_id: Id
    attempt: Attempt
    waited_s: Seconds  # from its arrival until its first step
    computed_s: Seconds  # from then to its first token
    num_new_tokens: Count  # computed
    num_tokens: Count  # of the prompt
    pulled_bytes: Count = 0
    pulled_s: Seconds = 0.0
    moved_bytes: Count = 0  # handed to the decode worker
    exposed_s: Seconds = 0.0  # of the hand-off: after the first token
    own_s: Seconds = 0.0  # of computed_s: its part, where others were computed too; 0: not known


class StepTimes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One step of an engine, of those that a worker tells of."""

    num_sequences: Count
    num_new_tokens: Count  # of prompts, computed in it
    num_context_tokens: Count  # that its sequences attend to
    step_s: Seconds
