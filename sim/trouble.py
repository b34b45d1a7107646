"""The kinds of faults, apart from the faults: `baton sim --help` lists them without loading a simulation."""

from enum import StrEnum


class Trouble(StrEnum):
    """The kinds of faults in a simulation."""

    ANY = "any"  # all faults that close connections or kill, and requests that cannot be answered
    SILENCE = "silence"  # faults that close nothing: black holes, pauses, slow steps, slow restarts
    SLOW_STEPS = "slow-steps"
    LOST_NODE = "lost-node"  # all workers of a node end or freeze, while other nodes have workers
    ROLLING_RESTART = "rolling-restart"
    MIGRATION = "migration"  # streams move all the time, under the faults of `ANY`
    NONE = "none"
