from baton.gateway.random_bytes import BLOCK_BYTES, RandomBytes


def test_bytes_of_several_blocks_have_the_asked_length_and_do_not_repeat() -> None:
    random_bytes = RandomBytes()
    ids = [random_bytes(12) for _ in range(3 * BLOCK_BYTES // 12)]  # a block does not end with an id
    assert {len(each) for each in ids} == {12}
    assert len(set(ids)) == len(ids)
