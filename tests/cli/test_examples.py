from __future__ import annotations

from pathlib import Path

import pytest

from ortrain.cli.text_classification.examples import (
    Example,
    check_labels,
    label_names,
    read_examples,
)
from ortrain.cli.usage import UsageError

EXPECTED = [Example("a, b", "1", 2), Example('he said "no"', "0", 3)]


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", 'text,label\n"a, b",1\n"he said ""no""",0\n'),
        ("x.csv", 'label,text,more\r\n1,"a, b",x\r\n0,"he said ""no""",y\r\n'),
        ("x.CSV", '\ufefftext,label\n"a, b",1\n"he said ""no""",0'),
        ("x.tsv", 'text\tlabel\na, b\t1\nhe said "no"\t0\n'),
        ("x.jsonl", '\n{"text": "a, b", "label": 1}\n{"label": "0", "text": "he said \\"no\\""}\n'),
    ],
)
def test_all_formats_read_the_same(tmp_path: Path, name: str, text: str) -> None:
    assert read_examples(write(tmp_path / name, text)) == EXPECTED


def test_a_file_without_a_header_takes_the_given_names(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", "1\ta b\n0\tc\n")
    examples = read_examples(path, columns=("label", "text"))
    assert examples == [Example("a b", "1", 1), Example("c", "0", 2)]


def test_columns_go_by_other_names_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "review,stars\nfine,4\n")
    examples = read_examples(path, text_column="review", label_column="stars")
    assert examples == [Example("fine", "4", 2)]


def test_a_lone_quotation_mark_in_a_tsv_swallows_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", 'text\tlabel\n"a\t1\nb\t0\n')
    assert [example.text for example in read_examples(path)] == ['"a', "b"]


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "text,label\n\na,1\n\n\nb,0\n")
    assert [example.row for example in read_examples(path)] == [3, 6]


def test_a_line_end_of_unicode_inside_a_json_string_ends_no_row(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "a\u2028b", "label": true}\n')
    assert read_examples(path) == [Example("a\u2028b", "true", 1)]


BROKEN = {
    "missing file": ("gone.csv", None, "gone.csv: no such file; check the path"),
    "unknown format": ("x.xlsx", "a", "unknown format '.xlsx'; convert"),
    "empty file": ("x.csv", "", "x.csv: is empty; give a file"),
    "blank file": ("x.jsonl", "\n \n", "x.jsonl: is empty; give a file"),
    "header only": ("x.csv", "text,label\n", "x.csv: no examples in it; give a file"),
    "missing text column": (
        "x.csv",
        "review,label\na,1\n",
        (
            "x.csv, row 1: there is no column 'text' among 'review', 'label'; name the right one "
            "with --text-column"
        ),
    ),
    "missing label column": ("x.tsv", "text\tstars\na\t1\n", "row 1: there is no column 'label'"),
    "no header line": ("x.tsv", "good film\t1\nb\t0\n", "name all of its columns with --columns"),
    "column twice": ("x.csv", "text,text,label\na,b,1\n", "2 columns are called 'text'; rename"),
    "too many fields": (
        "x.csv",
        "text,label\na,1\nb, c,0\n",
        "x.csv, row 3: has 3 fields where there are 2 columns; put text that holds a comma in",
    ),
    "too few fields": (
        "x.tsv",
        "text\tlabel\na\n",
        "x.tsv, row 2: has 1 fields where there are 2 columns; separate the fields by one tab",
    ),
    "open quotation mark": (
        "x.csv",
        'text,label\na,1\n"b,0\n',
        "x.csv, row 3: unexpected end of data; correct the quotation marks",
    ),
    "empty text": ("x.csv", "text,label\n ,1\n", "x.csv, row 2: 'text' is empty; fill it or drop"),
    "empty label": ("x.csv", "text,label\na,\n", "x.csv, row 2: 'label' is empty; fill it or drop"),
    "no JSON": ("x.jsonl", '{"text": "a", "label": 1}\n{"text"\n', "x.jsonl, row 2: is not JSON"),
    "no object": ("x.jsonl", "[1]\n", "x.jsonl, row 1: is not a JSON object; write one"),
    "no key": (
        "x.jsonl",
        '{"text": "a"}\n',
        "x.jsonl, row 1: there is no key 'label' among 'text'; add it to the row, or",
    ),
    "text of another type": ("x.jsonl", '{"text": 1, "label": 1}\n', "row 1: 'text' is not a stri"),
    "label of another type": (
        "x.jsonl",
        '{"text": "a", "label": 0.5}\n',
        "x.jsonl, row 1: 'label' is neither a string nor a whole number; make it",
    ),
}


@pytest.mark.parametrize(("name", "text", "message"), BROKEN.values(), ids=BROKEN)
def test_a_defect_is_named_by_file_row_and_remedy(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    path = tmp_path / name
    if text is not None:
        write(path, text)
    with pytest.raises(UsageError) as raised:
        read_examples(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_text_that_is_not_utf8_is_named_by_row(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes("text,label\na,1\ncafé,0\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"x\.csv, row 3: is not UTF-8 text; convert"):
        read_examples(path)


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.csv").mkdir()
    with pytest.raises(UsageError, match="is a directory; give the path of a file in it"):
        read_examples(tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["10", "9", "-1"], ["-1", "9", "10"]),
        (["b", "a", "b"], ["a", "b"]),
        (["b", "10", "9"], ["10", "9", "b"]),
    ],
)
def test_labels_are_ordered_by_value_or_by_name(labels: list[str], expected: list[str]) -> None:
    examples = [Example("x", label, row) for row, label in enumerate(labels)]
    assert label_names(examples, Path("x.csv")) == expected


def test_one_label_alone_is_no_classification() -> None:
    with pytest.raises(UsageError, match=r"x\.csv: every row has the label 'a'; add examples"):
        label_names([Example("x", "a", 2)], Path("x.csv"))


def test_a_label_unknown_in_training_is_named_by_row() -> None:
    examples = [Example("x", "a", 2), Example("y", "c", 3)]
    with pytest.raises(
        UsageError,
        match=r"eval\.csv, row 3: the label 'c' does not occur in train\.csv \(it has 'a', 'b'\); "
        "correct the row",
    ):
        check_labels(examples, Path("eval.csv"), ["a", "b"], Path("train.csv"))
