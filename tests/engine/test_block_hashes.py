"""What tells one block from another: tokens, scope, and what begins in it beside its tokens."""

from __future__ import annotations

import hashlib
import itertools

import pytest

from engine.kv_cache import BlockHashes, ContentKey
from engine.kv_cache.prefix_cache import namespace_key
from tests.engine.helpers import Driver

BLOCK = 4
PROMPT = list(range(100, 120))


def image(name: str, position: int) -> ContentKey:
    return ContentKey(position, hashlib.sha256(name.encode()).digest())


def hashes(*content: ContentKey, scope: bytes = b"") -> list[bytes]:
    return BlockHashes(scope, content).hash_full_blocks(PROMPT, BLOCK)


def common(one: list[bytes], other: list[bytes]) -> list[bool]:
    return [ours == right for ours, right in zip(one, other, strict=True)]


def test_blocks_before_an_image_are_told_by_their_tokens_and_all_after_it_by_the_image() -> None:
    baseline_hashes, cat, dog = hashes(), hashes(image("cat", 9)), hashes(image("dog", 9))
    assert common(baseline_hashes, cat) == common(cat, dog) == [True, True, False, False, False]
    assert common(cat, hashes(image("cat", 9))) == [True] * 5


@pytest.mark.parametrize("position", [8, 11])
def test_where_in_its_block_an_image_begins_matters(position: int) -> None:
    assert common(hashes(image("cat", 9)), hashes(image("cat", position)))[2] is False


def test_a_second_image_counts_from_its_own_block() -> None:
    one = hashes(image("cat", 2), image("dog", 13))
    other = hashes(image("cat", 2), image("bird", 13))
    assert common(one, other) == [True, True, True, False, False]


def test_two_images_of_one_block_are_both_told() -> None:
    one = hashes(image("cat", 8), image("dog", 10))
    assert common(one, hashes(image("cat", 8)))[2] is False
    assert common(one, hashes(image("dog", 8), image("cat", 10)))[2] is False


def test_a_scope_sets_all_blocks_apart() -> None:
    one, other = (hashes(scope=namespace_key(name)) for name in "ab")
    assert common(one, other) == [False] * 5
    assert common(hashes(), one) == [False] * 5
    # No field runs over into the next.
    assert namespace_key("ab", "c") != namespace_key("a", "bc")


def test_adapters_set_all_blocks_apart() -> None:
    scopes = [namespace_key("", digest) for digest in ("", "a" * 64, "b" * 64)]
    for one, other in itertools.combinations(scopes, 2):
        assert common(hashes(scope=one), hashes(scope=other)) == [False] * 5


def test_fault_19_a_name_that_is_anothers_salt_leads_to_no_block_of_its() -> None:
    """Whichever field carries it, and whatever is put beside it."""
    salt, mine, model = "s" * 64, "m" * 64, "0" * 64
    theirs = [namespace_key(salt), namespace_key(salt, model), namespace_key(salt, "")]
    forged = [
        namespace_key(mine, salt),
        namespace_key(mine + salt),
        namespace_key("", salt),
        namespace_key(mine),
    ]
    assert not set(theirs) & set(forged)
    for one in theirs:
        for other in forged:
            assert common(hashes(scope=one), hashes(scope=other)) == [False] * 5


def test_hashes_do_not_depend_on_how_a_sequence_grew() -> None:
    content = (image("cat", 2), image("dog", 13))
    slowly = BlockHashes(b"scope", content)
    for length in range(len(PROMPT) + 1):
        slowly.hash_full_blocks(PROMPT[:length], BLOCK)
    assert slowly.values == BlockHashes(b"scope", content).hash_full_blocks(PROMPT, BLOCK)


def test_a_copy_goes_its_own_way() -> None:
    parent = BlockHashes(b"scope", (image("cat", 2),))
    parent.hash_full_blocks(PROMPT, BLOCK)
    child = parent.copy()
    child.hash_full_blocks([*PROMPT, 1, 2, 3, 4], BLOCK)
    assert len(parent.values) == 5
    assert child.values[:5] == parent.values


@pytest.mark.parametrize("windows", [(), (6,), (0, 6)])
def test_what_stands_before_an_image_is_shared_by_prompts_with_other_images(
    windows: tuple[int, ...],
) -> None:
    driver = Driver(num_blocks=60, windows=windows)
    for content, cached in (
        ((image("cat", 9),), 0),
        ((image("dog", 9),), 8),
        ((image("cat", 9),), 16),
        ((image("cat", 10),), 8),
        ((), 8),
        ((image("cat", 9), image("dog", 17)), 16),
    ):
        sequence = driver.add(PROMPT, content=content)
        driver.step()
        assert sequence.num_cached_tokens == cached
        driver.scheduler.finish(sequence, "stop")


def test_the_same_image_of_two_tenants_is_never_shared() -> None:
    driver = Driver(num_blocks=60)
    for namespace in "ab":
        sequence = driver.add(PROMPT, namespace=namespace, content=(image("cat", 9),))
        driver.step()
        assert sequence.num_cached_tokens == 0


def test_another_image_in_the_first_block_was_never_shared() -> None:
    driver = Driver(num_blocks=60)
    reasons = []
    for namespace, name in (("a", "cat"), ("a", "dog"), ("b", "dog")):
        sequence = driver.add(PROMPT, namespace=namespace, content=(image(name, 1),))
        driver.step()
        reasons.append(sequence.timeline.cold_reason)
    assert reasons == ["no_shared_prefix"] * 3
