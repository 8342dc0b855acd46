"""What the command line takes for a number, a name or a path, and what it says of anything else."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ortrain.cli import arguments, main
from ortrain.cli.usage import Parser, UsageError, excerpt

WHOLE = ("--epochs", "--batch-size", "--max-length", "--checkpoint-every", "--seed")
DECIMAL = ("--learning-rate", "--weight-decay", "--dropout")
PATHS = ("--model", "--train", "--eval", "--output")

NO_NUMBERS = (
    "", " ", "x", "１２", "٣", "²", "1_000", " 5 ", "5\n6", "nan", "NaN", "inf", "-inf", "infinity",
    "0x10", "1e", "e5", ".", "+", "--5", "1,5", "1 000", "½", "1e400", "-1", "-1e5", "\0", "\ud800",
    "x" * 100_000, "-" + "9" * 5000,
)  # fmt: skip
NO_WHOLE_NUMBERS = ("1.5", "1.", "1e3", "1" + "0" * 30, "9" * 5000, "9" * 1_000_000, "99999999999")


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert line.isprintable()
    return line


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that the task says of options that it does not take."""
    # With = because a negative number would be read as an option otherwise.
    given = [f"{option}={value}" for option, value in zip(options[::2], options[1::2], strict=True)]
    required = [f"{option}=x" for option in PATHS if option not in options]
    with pytest.raises(SystemExit) as raised:
        main(["train", "text-classification", *required, *given])
    assert raised.value.code == 2
    return one_error(capsys)


@pytest.mark.parametrize("option", [*WHOLE, *DECIMAL])
def test_what_is_no_number_is_one_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in NO_NUMBERS + (NO_WHOLE_NUMBERS if option in WHOLE else ()):
        line = refused(capsys, option, value)
        assert f"error: argument {option}: '" in line
        assert f"see ortrain train {'text-classification'} --help" in line
        assert len(line) < 250


def test_a_count_has_a_bound_and_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'1000000000000' is more than 2147483647" in refused(capsys, "--epochs", "1" + "0" * 12)
    assert arguments.count("2147483647") == 2**31 - 1
    assert arguments.count("0" * 5000 + "7") == 7
    assert arguments.count("+7") == 7
    assert arguments.whole("-0") == 0
    assert arguments.seed("4294967295") == 2**32 - 1


@pytest.mark.parametrize("value", ["1e-400", "0", "-0", "0.000", "1e-99999999999999"])
def test_a_learning_rate_is_above_zero(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"'{value}' is not a number above 0" in refused(capsys, "--learning-rate", value)


def test_numbers_are_read_as_python_reads_them() -> None:
    rng = random.Random(0)
    for _ in range(300):
        whole = str(rng.randrange(1, 2**31 - 1))
        assert arguments.count(whole) == int(whole)
        decimal = rng.choice((repr(rng.random()), f"{rng.random() * 1e-9:e}", f".{whole}", "5."))
        assert arguments.positive(decimal) == float(decimal)


def test_the_names_of_columns_are_each_there_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments.column_names(" text ,label") == ("text", "label")
    assert "'text,label,text' has the name 'text' more than once" in refused(
        capsys, "--columns", "text,label,text"
    )
    for value in ("", ",", "a,", "a,,b", "\n", "," * 10_000):
        assert "is not a list of names such as text,label" in refused(capsys, "--columns", value)


@pytest.mark.parametrize("option", PATHS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "an empty text is not a path"),
        ("a\0b", "'a\\x00b' is not a path in UTF-8 without NUL characters"),
        ("\udcff", "'\\udcff' is not a path in UTF-8"),
        ("x" * 5000, "xxx…' is not a path (File name too long)"),
        ("a/" * 3000, "a/a…' is not a path (File name too long)"),
    ],
    ids=["empty", "NUL", "no UTF-8", "long name", "long path"],
)
def test_what_can_be_no_path_is_one_line(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, option, value)


@pytest.mark.parametrize("value", [".", "..", "/", "./", "a/..", "x" * 250])
def test_a_directory_to_make_has_a_name(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument --output: '" in refused(capsys, "--output", value)


def test_a_loop_of_links_is_no_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "a")
    assert "is not a path (Too many levels" in refused(capsys, "--train", str(tmp_path / "a"))


@pytest.mark.parametrize(
    "options", [["--bogus\nx"], ["--engine", "x\ny"], ["\x1b[31m"], ["--ep\ud800", "1"]]
)
def test_what_is_no_option_is_one_line(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    required = [f"{option}=x" for option in PATHS]
    with pytest.raises(SystemExit):
        main(["train", "text-classification", *required, *options])
    one_error(capsys)


def test_characters_that_do_not_show_are_escapes_in_a_message() -> None:
    error = UsageError("a\nb\tc\x1b[0m\u200b\ud800é😀: gone; look elsewhere")
    assert str(error) == r"a\nb\tc\x1b[0m\u200b\ud800é😀: gone; look elsewhere"
    assert str(UsageError("plain, ’typographic’ – and 好")) == "plain, ’typographic’ – and 好"


def test_an_excerpt_fits_into_a_line() -> None:
    assert excerpt("short ") == "short "
    assert excerpt("x" * 32) == "x" * 32
    assert excerpt("x" * 10**7) == "x" * 31 + "…"


def test_a_parser_of_commands_complains_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def parse(text: str) -> str:
        raise argparse.ArgumentTypeError("two\nlines")

    parser = Parser(prog="p")
    parser.add_argument("--x", type=parse)
    with pytest.raises(SystemExit):
        parser.parse_args(["--x", "1"])
    assert one_error(capsys) == r"p: error: argument --x: two\nlines; see p --help"


@pytest.mark.parametrize("options", [["--epochs", "9" * 5000], ["--train", ""]])
def test_a_process_ends_with_status_2_and_one_line(options: list[str]) -> None:
    command = [sys.executable, "-c", "import sys; from ortrain.cli import main; sys.exit(main())"]
    required = [f"{option}=x" for option in PATHS if option not in options]
    ended = subprocess.run(
        [*command, "train", "text-classification", *required, *options],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert options[0] in ended.stderr


def test_the_package_is_the_command_too() -> None:
    command = [sys.executable, "-m", "ortrain", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ortrain ")
