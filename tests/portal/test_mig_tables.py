"""What boards allow, and where slices go."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portal.hardware import boards, mig
from portal.hardware.boards import GIB, Board

BOARDS = [known.board for known in boards.TABLES]
H100 = boards.named("H100-80GB")
A30 = boards.named("A30-24GB")

every_board = st.sampled_from(BOARDS)


@st.composite
def wishes(draw: st.DrawFn) -> tuple[Board, tuple[str, ...]]:
    """Anything one might type for a card: legal or not, with profiles of other cards among them."""
    board = draw(every_board)
    strangers = [profile.name for other in BOARDS for profile in other.profiles]
    names = st.one_of(st.sampled_from([profile.name for profile in board.profiles]), st.sampled_from(strangers))
    return board, mig.in_order(board, draw(st.lists(names, min_size=1, max_size=9)))


@pytest.mark.parametrize(
    ("name", "memory_mib", "board"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", 40960, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB"),
        ("NVIDIA H100 PCIe", 81559, "H100-80GB"),
        ("NVIDIA H100 NVL", 95830, "H100-94GB"),
        ("NVIDIA GH200 480GB", 97871, "GH200-96GB"),
        ("NVIDIA H200", 143771, "H200-141GB"),
        ("NVIDIA B200", 183359, "B200-180GB"),
        ("NVIDIA A30", 24576, "A30-24GB"),
    ],
)
def test_a_card_is_recognised_by_its_name_and_its_memory(name: str, memory_mib: int, board: str) -> None:
    found = boards.find(name, memory_mib << 20)
    assert found is not None and found.name == board


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X", "NVIDIA A100X", ""])
def test_a_card_that_cannot_be_cut_has_no_table(name: str) -> None:
    assert boards.find(name, 48 * GIB) is None


def test_a_card_that_may_be_one_of_two_is_not_guessed_at() -> None:
    assert boards.find("NVIDIA A100", None) is None
    assert boards.find("NVIDIA A100", 64 * GIB) is None


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_way_to_cut_a_board_is_known(board: Board) -> None:
    """The figures are those of an independent enumeration of the published profiles and placements."""
    without_extras = [
        wish for wish in mig.legal(board) if not any(board.by_name[name].has_media for name in wish)
        and not any(board.by_name[name].size > board.by_name[name].slices == 1 for name in wish)
    ]  # fmt: skip
    layouts = sum(1 for layout in mig.all_layouts(board) if layout)
    figures = (len(mig.legal(board)), layouts, len(mig.maximal(board)), len(without_extras))
    assert figures == ((19, 75, 8, 9) if board is A30 else (127, 2318, 44, 37))


@pytest.mark.parametrize("board", [board for board in BOARDS if board is not A30], ids=lambda board: board.name)
def test_four_and_three_fill_a_card_and_two_threes_leave_nothing(board: Board) -> None:
    three, four = (next(p.name for p in board.profiles if p.slices == count) for count in (3, 4))
    assert mig.why_not(board, [four, three]) is None and mig.why_not(board, [three, three]) is None
    assert mig.why_not(board, [four, four]) is not None
    assert set(mig.room(board, mig.plan(board, [three, three]).layout).values()) == {0}


@pytest.mark.parametrize(
    ("board", "config"),
    [
        ("A100-40GB", {"1g.5gb": 7}), ("A100-40GB", {"2g.10gb": 3}), ("A100-40GB", {"3g.20gb": 2}),
        ("A100-40GB", {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}), ("A100-40GB", {"1g.10gb": 4}),
        ("A100-80GB", {"1g.10gb": 7}), ("A100-80GB", {"1g.20gb": 4}), ("A100-80GB", {"4g.40gb": 1}),
        ("H100-80GB", {"1g.10gb+me": 1}), ("H100-80GB", {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}),
        ("H100-94GB", {"1g.12gb": 7}), ("H100-94GB", {"1g.12gb": 2, "2g.24gb": 1, "3g.47gb": 1}),
        ("GH200-96GB", {"3g.48gb": 2}), ("H200-141GB", {"1g.18gb": 2, "2g.35gb": 1, "3g.71gb": 1}),
        ("B200-180GB", {"1g.23gb": 7}), ("B200-180GB", {"2g.45gb": 3}), ("A30-24GB", {"1g.6gb": 4}),
        ("A30-24GB", {"2g.12gb+me": 1}), ("A30-24GB", {"1g.6gb": 2, "2g.12gb": 1}), ("A30-24GB", {"4g.24gb": 1}),
    ],
)  # fmt: skip
def test_configurations_that_administrators_use_are_accepted(board: str, config: dict[str, int]) -> None:
    found = boards.named(board)
    planned = mig.plan(found, mig.read(found, config))
    assert Counter(piece.profile for piece in planned.layout) == Counter(config)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_preset_can_be_planned(board: Board) -> None:
    assert "all-balanced" in mig.presets(board)
    for name, wish in mig.presets(board).items():
        assert mig.why_not(board, wish) is None, name
        assert mig.read(board, name) == wish


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_legal_wish_is_planned_from_every_preset(board: Board) -> None:
    for preset in mig.presets(board).values():
        before = mig.plan(board, preset).layout
        for wish in mig.legal(board):
            planned = mig.plan(board, wish, before)
            assert mig.check(board, planned.layout) is None
            assert set(planned.kept) | set(planned.created) == set(planned.layout)
            assert set(planned.kept) | set(planned.destroyed) == set(before)


@given(wishes())
def test_a_plan_is_legal_and_a_refusal_names_a_legal_wish(case: tuple[Board, tuple[str, ...]]) -> None:
    board, wish = case
    reason = mig.why_not(board, wish)
    if reason is None:
        layout = mig.plan(board, wish).layout
        slots = [slot for piece in layout for slot in mig.slots_of(board, piece)]
        assert len(slots) == len(set(slots)) and max(slots) < board.slots
        assert all(piece.start in board.by_name[piece.profile].starts for piece in layout)
        assert sum(board.by_name[piece.profile].slices for piece in layout) <= board.slices
        assert mig.in_order(board, [piece.profile for piece in layout]) == wish in mig.legal(board)
        return
    with pytest.raises(mig.Illegal) as refused:
        mig.plan(board, wish)
    assert reason.endswith(".") and wish not in mig.legal(board)
    assert refused.value.nearest
    assert all(mig.why_not(board, near.wish) is None and near.change for near in refused.value.nearest)


@given(every_board, st.data())
def test_room_is_what_can_really_be_added(board: Board, data: st.DataObject) -> None:
    wish = data.draw(st.sampled_from(mig.legal(board)))
    layout = mig.plan(board, wish).layout
    for name, count in mig.room(board, layout).items():
        held = [piece for piece in mig.placements(board, [*wish, *[name] * count]) if set(layout) <= set(piece)]
        assert held, (layout, name, count)
        over = [piece for piece in mig.placements(board, [*wish, *[name] * (count + 1)]) if set(layout) <= set(piece)]
        assert not over, (layout, name, count)


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("3 × 2g.20gb + 1g.10gb", ("2g.20gb",) * 3 + ("1g.10gb",)),
        ("2g.20gb,2g.20gb", ("2g.20gb",) * 2),
        ("3x2g.20gb", ("2g.20gb",) * 3),
        ("2g.20gb x 3", ("2g.20gb",) * 3),
        ("1G.10GB+me + 3g.40gb", ("1g.10gb+me", "3g.40gb")),
        ("2*1g.10gb 1g.20gb", ("1g.10gb", "1g.10gb", "1g.20gb")),
        ("2x1g.10gb+3g.40gb", ("1g.10gb", "1g.10gb", "3g.40gb")),
        ("off", ()), ("", ()), ("  ", ()), ("0 × 1g.10gb", ()),
    ],
)  # fmt: skip
def test_layouts_are_read_as_people_write_them(text: str, wish: tuple[str, ...]) -> None:
    assert mig.parse(text) == wish


@pytest.mark.parametrize(
    "text", ["half", "7 slices", "1g", "1g.10gb + ", "2 × 3 × 1g.10gb", "99 × 1g.10gb", "1c.3g.40gb"]
)
def test_what_is_no_layout_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(mig.Unreadable, match="slice"):
        mig.parse(text)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        mig.parse(text)
    except mig.Unreadable as error:
        assert str(error)


@pytest.mark.parametrize(
    ("wanted", "reason", "near"),
    [
        ("2 × 4g.40gb", "2 × 4g.40gb: a card has room for 1.", "4g.40gb + 3g.40gb"),
        ("2 × 3g.40gb + 1g.10gb", "2 × 3g.40gb + 1g.10gb needs 9 of 8 memory slots.", "2 × 3g.40gb"),
        ("3g.40gb + 3 × 2g.20gb", "3g.40gb + 3 × 2g.20gb needs 9 of 7 compute slices.", "3g.40gb + 2 × 2g.20gb"),
        ("2 × 1g.10gb+me", "2 × 1g.10gb+me: a card has room for 1.", "1g.10gb+me + 1g.10gb"),
        ("3 × 1g.5gb", "there is no 1g.5gb on this card", "3 × 1g.10gb"),
    ],
)
def test_a_refusal_says_why_and_what_is_nearest(wanted: str, reason: str, near: str) -> None:
    wish = mig.read(H100, wanted)
    assert (mig.why_not(H100, wish) or "").startswith(reason)
    assert mig.nearest(H100, wish)[0].text == near


def test_what_exists_stays_where_it_is() -> None:
    existing = [mig.Slice(2, "2g.20gb"), mig.Slice(6, "1g.10gb")]
    planned = mig.plan(H100, ["2g.20gb", "2g.20gb", "1g.10gb"], existing)
    assert planned.kept == (mig.Slice(2, "2g.20gb"), mig.Slice(6, "1g.10gb")) and not planned.destroyed
    assert [piece.profile for piece in planned.created] == ["2g.20gb"]


def test_a_single_three_goes_where_it_leaves_the_most_room() -> None:
    layout = mig.plan(H100, ["3g.40gb"]).layout
    assert layout == (mig.Slice(4, "3g.40gb"),)
    assert mig.room(H100, layout)["1g.10gb"] == 4


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ([mig.Slice(1, "2g.20gb")], "2g.20gb cannot start at memory slot 1; it may start at 0, 2, 4."),
        ([mig.Slice(0, "4g.40gb"), mig.Slice(2, "1g.10gb")], "memory slot 2 would belong to 2 slices."),
        ([mig.Slice(0, "9g.90gb")], "there is no 9g.90gb on this card"),
    ],
)
def test_slices_in_impossible_places_are_refused(layout: list[mig.Slice], reason: str) -> None:
    assert (mig.check(H100, layout) or "").startswith(reason)
