"""The tables of the terminal: as wide as the terminal at the most, and without a broken number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from aggcli.report.folding import folded


def spaced(parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """The parts of a screen with an empty line between them."""
    for at, part in enumerate(parts):
        if at:
            yield ""
        yield part


class BlockTable(Table):
    """A table whose first column names its rows. Where its columns find no room side by side, they stand in blocks one below
    the other, each with the names of the rows; the caption comes last.

    Columns at the right edge (`numbers`) are as wide as their widest cell, so that a number or an interval stays on its line:
    with `prose`, where they hold sentences too, as wide as their longest word. Only a cell that has no room even with half of
    the width, or with what the names of the rows leave, is broken. All other columns fold; beside them the names of the rows
    stay whole up to three eighths of the width. `whole`: never in blocks, for rows
    that the first column does not tell apart. `fold_names`: names of rows wider than three eighths of the whole are broken
    where that keeps the table in one block.
    """

    def __init__(
        self,
        heads: Sequence[str],
        numbers: Iterable[str] = (),
        *,
        padding: tuple[int, int, int, int] = (0, 1, 0, 1),
        caption: str = "",
        prose: bool = False,
        whole: bool = False,
        fold_names: bool = False,
    ) -> None:
        self.prose, self.whole, self.fold_names = prose, whole, fold_names
        self.names_width: int | None = None
        super().__init__(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            show_edge=False,
            padding=padding,
            caption=Text(caption) if caption else None,
            caption_justify="left",
        )
        right = set(numbers)
        for head in heads:
            self.add_column(Text(head), justify="right" if head in right else "left", overflow="fold")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        every = range(len(self.columns))
        if self.prose and len(every) == 2:  # sentences beside them would squeeze the names of the rows
            names = [Measurement.get(console, options, cell).maximum for cell in self.columns[0].cells]
            self.names_width = min(max(names, default=0), options.max_width * 3 // 8)
        wide, widths = ([self._width(at, console, options, narrow=narrow) for at in every] for narrow in (False, True))
        attempts = [(False, False), (True, False), *([(True, True)] if self.fold_names else [])]
        for narrow, fold in attempts:
            names = options.max_width * 3 // 8 if fold else None
            whole = self._of(every, widths if narrow else wide, narrow=narrow, names=names)
            if _fits(whole, console, options) or (narrow and (self.whole or len(every) < 3)):
                whole.caption = self.caption
                yield from whole.__rich_console__(console, options)
                return
        block, names = [0], options.max_width * 3 // 8 if self.fold_names else None
        for at in every[1:]:
            if len(block) > 1 and not _fits(self._of([*block, at], widths, narrow=True, names=names), console, options):
                yield self._of(block, widths, narrow=True, names=names)
                yield ""
                block = [0]
            block.append(at)
        yield self._of(block, widths, narrow=True, names=names)
        if self.caption:
            yield self.caption

    def _width(self, at: int, console: Console, options: ConsoleOptions, *, narrow: bool) -> int | None:
        """Of a column of numbers: that of its widest cell, and of its head, folded where `narrow`. None: as rich sees fit."""
        column = self.columns[at]
        if column.justify != "right":
            return self._names(console, options) if at == 0 else None
        head = Measurement.get(console, options, column.header)
        cells = [Measurement.get(console, options, cell) for cell in column.cells]
        names = _least(self._of([0], [None], narrow=narrow), console, options)
        most = max(options.max_width // 2, options.max_width - names - 4)
        longest = [cell.minimum if narrow and self.prose else cell.maximum for cell in cells]
        return min(most, max(head.minimum if narrow else head.maximum, *longest, 1))

    def _names(self, console: Console, options: ConsoleOptions) -> int | None:
        """The width of the names of the rows where text that folds would squeeze them; None: as rich sees fit."""
        if self.prose or all(column.justify == "right" for column in self.columns[1:]):
            return None
        most = options.max_width * 3 // 8
        head = Measurement.get(console, options, self.columns[0].header)
        cells = max((Measurement.get(console, options, cell).maximum for cell in self.columns[0].cells), default=0)
        widest = max(cells, head.maximum if head.maximum <= most else head.minimum)
        return widest if 0 < widest <= most or self.fold_names else None

    def _of(self, columns: Sequence[int], widths: Sequence[int | None], *, narrow: bool, names: int | None = None) -> Table:
        """A table of some of the columns, without a caption; columns of prose share what room there is where it is `narrow`.
        `names`: what the names of the rows are folded to, behind a hyphen where there is one."""
        table = Table(box=self.box, pad_edge=False, show_edge=False, padding=self.padding, caption_justify="left")
        table.expand = narrow and self.prose and len(columns) > 1
        own = [self.columns[at] for at in columns]
        for at, column in zip(columns, own, strict=True):
            ratio = 1 if table.expand and widths[at] else None
            least = self.names_width if at == 0 else None
            table.add_column(
                column.header, justify=column.justify, overflow="fold", width=widths[at], ratio=ratio, min_width=least
            )
        for row, cells in zip(self.rows, zip(*(column.cells for column in own), strict=True), strict=True):
            first = cells[0] if names is None else folded(str(cells[0]), names, then="  ", hyphens=True)
            table.add_row(first, *cells[1:], end_section=row.end_section)
        if names is not None:
            table.columns[0].width = names
        return table


def _fits(table: Table, console: Console, options: ConsoleOptions) -> bool:
    """Whether no word of the table has to be broken."""
    return _least(table, console, options) <= options.max_width


def _least(table: Table, console: Console, options: ConsoleOptions) -> int:
    """The width that a table takes with every word whole: rich's measure, which stops at the width that there is."""
    return console.measure(table, options=options.update(width=1_000_000)).minimum
