from tests.api_page import page
from tests.served import ROOT


def test_api_page_is_what_the_docstrings_say() -> None:
    written = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert page() == written, "docs/api.md is stale: run `make api`"
