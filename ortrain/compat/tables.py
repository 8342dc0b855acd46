"""``PTable``: rows of text in columns that are as wide as their longest entry."""

from __future__ import annotations

from collections.abc import Sequence


class Row:
    """A row of a table.

    Attributes:
        columns: its entries.
    """

    def __init__(self, columns: Sequence[object]) -> None:
        self.columns = [str(column) for column in columns]
        self._below: list[PTable] = []

    def append_annotation_table(self, ptable: PTable) -> None:
        """Puts another table below this row."""
        self._below.append(ptable)

    @property
    def annotations(self) -> list[PTable]:
        """The tables below this row."""
        return self._below


class PTable:
    """Rows of as many columns each; ``str()`` shows them.

    Args:
        sortable: show the rows sorted by their entries.
    """

    def __init__(self, sortable: bool = False) -> None:
        self._rows: list[Row] = []
        self._sortable = sortable

    def add_row(self, columns: Sequence[object]) -> Row:
        """Adds a row.

        Raises:
            ValueError: it has another number of columns than those before.
        """
        if self._rows and len(columns) != len(self._rows[0].columns):
            raise ValueError(
                f"a row of {len(columns)} columns in a table of {len(self._rows[0].columns)}"
            )
        self._rows.append(Row(columns))
        return self._rows[-1]

    def get_string(
        self, first_column_width: int | None = None, second_column_width: int | None = None
    ) -> str:
        """The table as text.

        Args:
            first_column_width: the least width of the first column.
            second_column_width: of the second.
        """
        if not self._rows:
            return ""
        least = [first_column_width or 0, second_column_width or 0]
        widths = [
            max(least[i] if i < 2 else 0, *(len(row.columns[i]) for row in self._rows))
            for i in range(len(self._rows[0].columns))
        ]
        key = (lambda row: row.columns) if self._sortable else None
        lines = []
        for row in sorted(self._rows, key=key) if key else self._rows:
            cells = zip(row.columns, widths, strict=True)
            lines.append(" : ".join(entry.ljust(width) for entry, width in cells).rstrip())
            lines += [f"  {line}" for table in row.annotations for line in str(table).splitlines()]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.get_string()
