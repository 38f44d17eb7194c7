"""What may be deleted: no serving engine loses its way to the newest version, and the rest stays within its bytes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.retention import StoredLink, superfluous


def anchor(version, size=100, run_epoch=0):
    return StoredLink(run_epoch, version, None, size)


def delta(version, base=None, size=10, run_epoch=0):
    return StoredLink(run_epoch, version, version - 1 if base is None else base, size)


def kept(links, *, slowest, keep_bytes=0):
    gone = superfluous(links, slowest=slowest, keep_bytes=keep_bytes)
    assert len(set(gone)) == len(gone)
    assert set(gone) <= set(links)
    return set(links) - set(gone)


@st.composite
def histories(draw):
    """Versions as a trainer publishes them, some of whose manifests are lost; and the epoch's numbers."""
    links, previous = [], None
    for version in sorted(draw(st.sets(st.integers(0, 30), min_size=1, max_size=12))):
        kind = "anchor" if previous is None else draw(st.sampled_from(["delta", "delta", "anchor", "both"]))
        sizes = [draw(st.integers(1, 50)) for _ in range(2)]
        links += [StoredLink(1, version, previous, sizes[0])] if kind != "anchor" else []
        links += [StoredLink(1, version, None, sizes[1])] if kind != "delta" else []
        previous = version
    lost = draw(st.sets(st.sampled_from(links), max_size=3))
    bases = st.none() | st.integers(0, 40)
    old = draw(st.lists(st.builds(StoredLink, st.just(0), st.integers(0, 40), bases, st.integers(1, 50)), max_size=3))
    return links, [link for link in [*links, *old] if link not in lost]


def reaches_newest(links, version):
    """An oracle: whether an engine at `version` (None: with nothing) can get to the newest of them."""
    current = {link for link in links if link.run_epoch == 1}
    newest = max(link.version for link in current)
    at, grew = {version}, True
    while grew:
        more = {link.version for link in current if (link.base in at if link.base is not None else link.version > (version or -1))}
        grew = not more <= at
        at |= more
    return newest in at


@settings(max_examples=500, deadline=None)
@given(histories(), st.data(), st.none() | st.integers(0, 300))
def test_no_serving_engine_loses_its_way_and_the_rest_stays_within_its_bytes(history, data, keep_bytes):
    published, links = history
    current = [link for link in links if link.run_epoch == 1]
    if not current:
        return
    newest = max(link.version for link in current)
    versions = [link.version for link in published if link.version <= newest]
    serving = data.draw(st.sets(st.sampled_from(versions)))
    stays = kept(links, slowest=min(serving, default=None), keep_bytes=keep_bytes)
    assert {link for link in current if link.version == newest} <= stays
    for version in serving or {None}:
        assert reaches_newest(stays, version) or not reaches_newest(current, version)
    assert all(link.run_epoch == 1 for link in stays)
    least = kept(links, slowest=min(serving, default=None))
    if keep_bytes is not None:
        assert stays == least or sum(link.bytes for link in stays) <= keep_bytes
    assert least <= stays


def test_what_every_engine_has_passed_goes_and_the_newest_stays():
    links = [anchor(0), delta(1), delta(2), delta(3)]
    assert kept(links, slowest=1) == {delta(2), delta(3)}
    assert kept(links, slowest=3) == {delta(3)}
    assert kept(links, slowest=9) == {delta(3)}


def test_while_no_engine_serves_the_newest_anchor_and_what_follows_it_stay():
    links = [anchor(0), delta(1), anchor(1), delta(2)]
    assert kept(links, slowest=None) == {anchor(1), delta(2)}


def test_an_engine_behind_a_broken_chain_keeps_the_anchor_that_goes_round_it():
    assert kept([anchor(0), delta(1), anchor(3), delta(3), delta(4)], slowest=1) == {anchor(3), delta(3), delta(4)}
    assert kept([anchor(0), delta(1), anchor(2), delta(3)], slowest=1) == {anchor(2), delta(3)}


def test_history_goes_oldest_first_until_all_fits():
    links = [anchor(0), delta(1), delta(2), delta(3), delta(4)]
    assert kept(links, slowest=3, keep_bytes=140) == set(links)
    assert kept(links, slowest=3, keep_bytes=139) == {delta(1), delta(2), delta(3), delta(4)}
    assert kept(links, slowest=3, keep_bytes=25) == {delta(3), delta(4)}
    assert kept(links, slowest=3, keep_bytes=None) == set(links)


def test_history_begins_at_the_newest_anchor():
    links = [anchor(0), delta(1), delta(2), anchor(2), delta(3)]
    assert kept(links, slowest=3, keep_bytes=None) == {anchor(2), delta(3)}


def test_older_run_epochs_go():
    assert kept([anchor(7), delta(8), anchor(3, run_epoch=1)], slowest=3, keep_bytes=None) == {anchor(3, run_epoch=1)}
    assert superfluous([], slowest=None, keep_bytes=0) == []
