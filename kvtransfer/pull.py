"""Whether what a peer wants to pull is still here: what it knows is a hint, our ledger is right."""

from baton.kvtransfer.handoff import Terms
from baton.kvtransfer.messages import Pull


def pull_complaint(pull: Pull, incarnation: bytes, terms: Terms) -> str | None:
    """Why the wanted pages can't be sent; None when each of them still holds what it is wanted for."""
    if pull.holder != incarnation:
        return "the holder was started again since"
    ledger = terms.ledger
    if len(pull.pages) != terms.num_destination_pages(pull.num_units):
        return f"{pull.num_units} units do not lie in {len(pull.pages)} granted pages"
    if len(pull.wanted_pages) != terms.num_source_pages(pull.num_units):
        return f"{pull.num_units} units do not lie in {len(pull.wanted_pages)} pages"
    if len(set(pull.wanted_pages)) != len(pull.wanted_pages):
        return "a page is wanted twice"
    for page, generation in zip(pull.wanted_pages, pull.wanted_generations, strict=True):
        if page >= ledger.num_pages or not ledger.is_known(page):
            return f"page {page} is not known"
        if ledger.generation(page) != generation:
            return f"page {page} has generation {ledger.generation(page)}, not {generation}"
    return None
