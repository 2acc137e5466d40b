"""What a folder of class folders is taken for."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.data.db.class_folders import Candidate, scan, shuffled
from paceline.errors import ConfigError, DataError
from tests.harness.data.image_folder import put


def test_labels_are_the_places_of_the_sorted_class_names(tmp_path: Path) -> None:
    for name in ("zebra/1.jpg", "ant/2.jpg", "Bee/1.jpg", "ant/10.jpg", "ant/1.jpg"):
        put(tmp_path, name, b"")
    found = scan(tmp_path)
    assert found.classes == ("Bee", "ant", "zebra")
    assert [(c.name, c.label) for c in found.candidates] == [
        ("Bee/1.jpg", 0),
        ("ant/1.jpg", 1),
        ("ant/10.jpg", 1),
        ("ant/2.jpg", 1),
        ("zebra/1.jpg", 2),
    ]


def test_images_are_found_at_any_depth(tmp_path: Path) -> None:
    put(tmp_path, "a/2019/summer/1.jpg", b"")
    put(tmp_path, "a/1.jpg", b"")
    assert [c.name for c in scan(tmp_path).candidates] == ["a/1.jpg", "a/2019/summer/1.jpg"]


def test_hidden_names_files_beside_the_classes_and_linked_circles_are_skipped(
    tmp_path: Path,
) -> None:
    put(tmp_path, "a/1.jpg", b"")
    put(tmp_path, "a/._1.jpg", b"")
    put(tmp_path, ".ipynb_checkpoints/1.jpg", b"")
    put(tmp_path, "README", b"")
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a", target_is_directory=True)
    found = scan(tmp_path)
    assert found.classes == ("a",)
    assert [c.name for c in found.candidates] == ["a/1.jpg"]
    assert found.skipped == 2
    assert found.beside == ("README",)
    assert found.link_cycles == ("a/again",)


def test_a_class_and_an_image_may_be_links(tmp_path: Path) -> None:
    put(tmp_path, "elsewhere/cats/1.jpg", b"")
    (tmp_path / "all").mkdir()
    (tmp_path / "all/cat").symlink_to(tmp_path / "elsewhere/cats")
    (tmp_path / "all/dog").mkdir()
    (tmp_path / "all/dog/2.jpg").symlink_to(tmp_path / "elsewhere/cats/1.jpg")
    assert [c.name for c in scan(tmp_path / "all").candidates] == ["cat/1.jpg", "dog/2.jpg"]


def test_links_to_folders_and_files_are_followed_at_any_depth(tmp_path: Path) -> None:
    put(tmp_path, "disk/cats/old/1.jpg", b"")
    put(tmp_path, "disk/2.jpg", b"")
    put(tmp_path, "all/cat/more/3.jpg", b"")
    (tmp_path / "all/cat/disk").symlink_to(tmp_path / "disk/cats")
    (tmp_path / "all/cat/more/2.jpg").symlink_to("../../../disk/2.jpg")
    (tmp_path / "all/cat/more/chain").symlink_to("../disk")
    found = scan(tmp_path / "all")
    assert [c.name for c in found.candidates] == [
        "cat/disk/old/1.jpg",
        "cat/more/2.jpg",
        "cat/more/3.jpg",
        "cat/more/chain/old/1.jpg",
    ]
    assert (found.skipped, found.link_cycles) == (0, ())


@pytest.mark.parametrize("target", [".", "..", "../..", "../../cat", "../../../.."])
def test_a_link_in_a_circle_is_left_out_and_named(tmp_path: Path, target: str) -> None:
    put(tmp_path, "all/cat/sub/1.jpg", b"")
    (tmp_path / "all/cat/sub/round").symlink_to(target)
    found = scan(tmp_path / "all")
    assert [c.name for c in found.candidates] == ["cat/sub/1.jpg"]
    assert (found.classes, found.link_cycles) == (("cat",), ("cat/sub/round",))


def test_links_from_two_classes_to_each_other_end(tmp_path: Path) -> None:
    for one, other in (("cat", "dog"), ("dog", "cat")):
        put(tmp_path, f"{one}/1.jpg", b"")
        (tmp_path / one / "other").symlink_to(tmp_path / other)
    found = scan(tmp_path)
    assert [c.name for c in found.candidates if c.label == 0] == ["cat/1.jpg", "cat/other/1.jpg"]
    assert found.link_cycles == ("cat/other/other", "dog/other/other")


@pytest.mark.parametrize("target", [".", "..", "cat/.."])
def test_a_link_to_all_classes_is_no_class(tmp_path: Path, target: str) -> None:
    put(tmp_path, "all/cat/1.jpg", b"")
    (tmp_path / "all/everything").symlink_to(target)
    found = scan(tmp_path / "all")
    assert (found.classes, found.link_cycles) == (("cat",), ("everything",))


def test_a_folder_that_cannot_be_listed_says_what_to_check(tmp_path: Path) -> None:
    (tmp_path / "all").touch()
    with pytest.raises(DataError, match=r"all can't be listed: Not a directory\. Check the disk"):
        scan(tmp_path / "all")


@pytest.mark.parametrize("target", ["/nowhere/dogs", "dog"])  # not mounted; itself
def test_a_class_that_is_a_link_to_nothing_is_an_error(tmp_path: Path, target: str) -> None:
    put(tmp_path, "cat/1.jpg", b"")
    (tmp_path / "dog").symlink_to(target)
    with pytest.raises(DataError, match=f"dog is a link to {target}, which isn't there: mount"):
        scan(tmp_path)


def test_an_image_that_is_a_link_to_nothing_or_itself_is_a_candidate(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.jpg", b"")
    (tmp_path / "cat/2.jpg").symlink_to("/nowhere/2.jpg")
    (tmp_path / "cat/3.jpg").symlink_to("3.jpg")
    assert [c.name for c in scan(tmp_path).candidates] == ["cat/1.jpg", "cat/2.jpg", "cat/3.jpg"]


@pytest.mark.parametrize(
    "name",
    [
        "__MACOSX",
        "@eaDir",
        ".ipynb_checkpoints",
        ".DS_Store",
        "Thumbs.db",
        "THUMBS.DB",
        "desktop.ini",
        "#recycle",
        "@Recycle",
        "$RECYCLE.BIN",
        "lost+found",
        "__pycache__",
        ".@__thumb",
    ],
)
def test_what_desktops_archives_and_disks_leave_behind_is_no_class_and_no_image(
    tmp_path: Path, name: str
) -> None:
    put(tmp_path, "cat/1.jpg", b"")
    put(tmp_path, f"{name}/cat/1.jpg", b"\xff\xd8\xff")
    put(tmp_path, f"cat/{name}/1.jpg/SYNOPHOTO_THUMB_M.jpg", b"\xff\xd8\xff")
    put(tmp_path, f"cat/old/{name}", b"\xff\xd8\xff")
    found = scan(tmp_path)
    assert found.classes == ("cat",)
    assert [c.name for c in found.candidates] == ["cat/1.jpg"]
    assert found.skipped == 3


@pytest.mark.parametrize(
    "files",
    [
        ("cat/2019/1.jpg", "dog/2019/1.jpg"),  # no names of parts
        ("train/new/1.jpg", "test/old/1.jpg"),  # nothing recurs
        ("train/old/1.jpg", "bus/old/1.jpg", "test/1.jpg"),  # one part only has folders
        ("train/old/1.jpg", "train/new/1.jpg"),
    ],
)
def test_classes_may_have_subfolders(tmp_path: Path, files: tuple[str, ...]) -> None:
    for name in files:
        put(tmp_path, name, b"")
    assert len(scan(tmp_path).candidates) == len(files)


@pytest.mark.parametrize("parts", [("Test", "Train"), ("train", "val"), ("test", "valid", "dev")])
@pytest.mark.parametrize("besides", [None, "bus/1.jpg", "train/1.jpg", "train/Thumbs.db"])
def test_parts_with_classes_inside_are_no_classes(
    tmp_path: Path, parts: tuple[str, ...], besides: str | None
) -> None:
    for part in parts:
        put(tmp_path, f"{part}/cat/1.jpg", b"")
        put(tmp_path, f"{part}/dog/2019/1.jpg", b"")
    if besides is not None:
        put(tmp_path, besides, b"\xff\xd8\xff")
    with pytest.raises(ConfigError, match="each of which contains class folders: create one"):
        scan(tmp_path)


def test_an_empty_part_beside_one_with_classes_is_no_class(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/1.jpg", b"")
    (tmp_path / "test").mkdir()
    with pytest.raises(ConfigError, match=r"has train/, which contains class folders: create one"):
        scan(tmp_path)


def test_a_class_without_images_keeps_its_label(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    put(tmp_path, "b/1.jpg", b"")
    found = scan(tmp_path)
    assert found.classes == ("a", "b")
    assert found.candidates == (Candidate("b/1.jpg", 1),)


def test_images_without_class_folders_are_an_error_that_says_where_to_put_them(
    tmp_path: Path,
) -> None:
    put(tmp_path, "1.jpg", b"")
    with pytest.raises(ConfigError, match=r"no subfolders: put the images of each class in"):
        scan(tmp_path)


@pytest.mark.parametrize("name", [b"two\nlines", b"latin-\xe9"])
def test_a_class_name_that_is_no_line_of_text_is_refused(tmp_path: Path, name: bytes) -> None:
    import os

    os.mkdir(os.fsencode(tmp_path) + b"/" + name)
    with pytest.raises(ConfigError, match="UTF-8 without line breaks"):
        scan(tmp_path)


def test_the_shuffled_order_never_changes() -> None:
    candidates = [Candidate(f"a/{i}.jpg", 0) for i in range(8)]
    # Printed by: for i in 0..7, sha256("7/a/<i>.jpg"), sorted by digest (shell: sha256sum).
    assert [c.name[2] for c in shuffled(candidates, 7)] == list("76014325")
    assert shuffled(candidates, 8) != shuffled(candidates, 7)


def test_taking_a_file_away_leaves_the_order_of_the_others() -> None:
    candidates = [Candidate(f"a/{i}.jpg", 0) for i in range(100)]
    whole = shuffled(candidates, 0)
    assert shuffled(candidates[1:], 0) == [c for c in whole if c != candidates[0]]
