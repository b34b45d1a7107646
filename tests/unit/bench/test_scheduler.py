from baton.bench.scheduler import decode_steps, report_cache, report_steps, workload_seconds


def test_every_part_of_every_step_is_timed() -> None:
    times = decode_steps(32, 5)
    assert [len(part) for part in times] == [5, 5, 5]
    assert all(value > 0 for part in times for value in part)


def test_the_same_tokens_are_computed_with_and_without_the_cache() -> None:
    on, off = (workload_seconds(5, prefix_caching=caching) for caching in (True, False))
    assert on.num_tokens == off.num_tokens > 0


def test_reports_print_the_limit_beside_the_figure() -> None:
    lines: list[str] = []
    report_steps(32, 5, lines.append)
    report_cache(2, lines.append)
    text = "\n".join(lines)
    assert "plan + apply" in text and "limit 50" in text and "limit 1 %" in text
