"""Watch a cluster in the terminal: workers, tenants and requests, a snapshot a second. It changes nothing.

j, k, arrows   next and previous row          tab            next list
gg, G          first and last row             / , Esc        filter, all rows again
Ctrl-D, Ctrl-U half a page                    s, S           sort by the next column, the other way round
Enter, l       everything about the row       q              close, or quit

With tenants the key of an admin is needed, in BATON_API_KEY or OPENAI_API_KEY; --operator-port needs none.
"""

import argparse
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import msgspec
from rich.console import Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input, Sparkline, Static
from textual.worker import Worker, get_current_worker

from baton.cluster.cli import output
from baton.cluster.cli.commands.explain import parts_of, waterfall
from baton.cluster.cli.connections import HttpClient, add_url_options, decoded, url_of
from baton.cluster.cli.options import CliCommand
from baton.errors import BatonError, InvalidRequest
from baton.gateway.metrics.snapshot import ClusterSnapshot, Point, TenantRow, WorkerRow
from baton.messages.bounds import short_id
from baton.messages.control import Decision
from baton.messages.timeline import RequestSummary, RequestTimeline

SILENCE_S: Final = 10.0  # of a stream that tells something every second
RETRY_S: Final = 2.0
REQUESTS_EVERY_S: Final = 5.0
NUM_REQUESTS: Final = 100
NUM_POINTS: Final = 900
BAR_WIDTH: Final = 12
PAGE_STYLES: Final = {"active": "blue", "cached": "green", "leased": "yellow", "quarantined": "red"}

# The screen: tiles, two sparklines and a list, fed by the events of `/ui/events`.
#
# 1. A thread reads the events and hands each to the app. A lost connection is made again.
# 2. The app keeps the latest snapshot, and shows the rows of the list that is open. Requests are not in a
#    snapshot: the thread asks for the slowest ones every REQUESTS_EVERY_S while their list is open.
# 3. `Listing` draws the rows that are seen and no others, so that a thousand workers cost as much as ten.

Cell: TypeAlias = str | Text
Row: TypeAlias = Any  # a WorkerRow, a TenantRow or a RequestSummary, by the list


class Requests(msgspec.Struct, frozen=True):
    """The answer of `/admin/requests`."""

    data: list[RequestSummary]


class Column(NamedTuple):
    """One column of a list."""

    name: str
    width: int
    value: Callable[[Row], Any]
    show: Callable[[Any], Cell] = str  # of a value
    order: Callable[[Row], Any] | None = None  # None: by the value
    is_number: bool = True

    def cell(self, row: Row) -> Cell:
        """Return what the column shows of a row."""
        return self.show(self.value(row))

    def key(self, row: Row) -> Any:
        """Return the key that rows are sorted by; decode-2 comes before decode-10."""
        key = self.value(row) if self.order is None else self.order(row)
        return output.natural(key) if isinstance(key, str) else -1 if key is None else key


class ListKind(NamedTuple):
    """A kind of rows: its name, its columns, and the key of a row."""

    name: str
    columns: Sequence[Column]
    key: Callable[[Row], str]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def seconds(value: float | None) -> str:
    """Return a time in seconds or milliseconds, or - for None."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def count(value: float) -> str:
    """Return a count with a unit where it is large."""
    for unit, least, size in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if value >= least:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def in_use(row: WorkerRow) -> float:
    """Return the share of a worker's KV pages that sequences and writers hold."""
    held = sum(num for state, num in row.pages.items() if state not in ("free", "cached"))
    return held / row.num_pages if row.num_pages else 0.0


def _pages(row: WorkerRow) -> Text:
    bar, used = Text(), 0
    for state, style in PAGE_STYLES.items():
        width = round(BAR_WIDTH * row.pages.get(state, 0) / max(1, row.num_pages))
        bar.append("\u2588" * width, style)
        used += width
    return bar.append("\u2591" * max(0, BAR_WIDTH - used), "dim")


def _slowest_part(row: RequestSummary) -> str:
    if not row.seconds:
        return "-"
    name = max(row.seconds, key=lambda part: row.seconds[part])
    return f"{name} {_percent(_share(row.seconds[name], row.total_s))}"


def _in_time(row: TenantRow) -> float | None:
    return _share(row.status.num_met, row.status.num_met + row.status.num_missed)


def _state(row: WorkerRow) -> str:
    return "sleeps" if row.is_asleep else "drains" if row.is_draining else "serves"


WORKERS: Final = ListKind(
    "workers",
    (
        Column("name", 16, lambda row: row.name, is_number=False),
        Column("role", 8, lambda row: row.role, is_number=False),
        Column("node", 14, lambda row: row.node or "-", is_number=False),
        Column("state", 7, _state, is_number=False),
        Column("run", 5, lambda row: row.num_running),
        Column("wait", 5, lambda row: row.num_waiting),
        Column("tok/s", 7, lambda row: row.tokens_per_s, count),
        Column("KV pages", BAR_WIDTH, lambda row: row, _pages, in_use, is_number=False),
        Column("use", 5, in_use, _percent),
        Column("hits", 5, lambda row: _share(row.prefix_hits_tokens, row.prefix_queries_tokens), _percent),
        Column("in", 4, lambda row: row.num_incoming),
        Column("out", 4, lambda row: row.num_outgoing),
        Column("MB/s", 7, lambda row: row.sent_bytes_per_s / 1e6, "{:.1f}".format),
    ),
    lambda row: str(row.id),
)
TENANTS: Final = ListKind(
    "tenants",
    (
        Column("name", 24, lambda row: row.status.tenant, is_number=False),
        Column("weight", 7, lambda row: row.status.weight, "{:g}".format),
        Column("active", 7, lambda row: row.status.num_active),
        Column("queued", 7, lambda row: row.status.num_queued),
        Column("oldest", 8, lambda row: row.status.oldest_wait_s, seconds),
        Column("work", 8, lambda row: row.status.work_tokens, count),
        Column("in time", 8, _in_time, _percent),
        Column("refused", 8, lambda row: sum(row.status.refused.values()), count),
        Column("calls", 8, lambda row: sum(row.counts.calls.values()), count),
    ),
    lambda row: str(row.status.tenant),
)
REQUESTS: Final = ListKind(
    "requests",
    (
        Column("request", 33, lambda row: row.request_id, is_number=False),
        Column("tenant", 12, lambda row: row.tenant or "-", is_number=False),
        Column("outcome", 9, lambda row: row.outcome, is_number=False),
        Column("time", 8, lambda row: row.total_s, seconds),
        Column("first", 8, lambda row: row.first_token_s, seconds),
        Column("most time in", 24, _slowest_part, is_number=False),
        Column("prompt", 7, lambda row: row.num_prompt_tokens),
        Column("tokens", 7, lambda row: row.num_tokens),
        Column("attempts", 8, lambda row: row.num_attempts),
    ),
    lambda row: str(row.request_id),
)
LISTS: Final = (WORKERS, TENANTS, REQUESTS)


class Listing(ScrollView, can_focus=True):
    """A list of rows with a cursor. The head stays in the first line."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "move(1)"),
        Binding("k,up", "move(-1)"),
        Binding("ctrl+d,pagedown", "half_page(1)"),
        Binding("ctrl+u,pageup", "half_page(-1)"),
        Binding("G,end", "move(1000000)"),
        Binding("home", "move(-1000000)"),
        Binding("g", "first"),
        Binding("s", "sort"),
        Binding("S", "reverse"),
        Binding("enter,l,right", "choose"),
    ]
    DEFAULT_CSS = "Listing { height: 1fr; } Listing .head { text-style: bold; }"
    COMPONENT_CLASSES: ClassVar[set[str]] = {"head"}

    class Chosen(Message):
        """A row was chosen."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self) -> None:
        super().__init__()
        self.kind = WORKERS
        self.rows: list[Row] = []  # as shown: filtered and sorted
        self.cursor = 0
        self.filter = ""
        self._all: Sequence[Row] = ()
        self._sorting: dict[str, tuple[int, bool]] = {"requests": (3, True)}  # list -> column, descending
        self._has_g = False  # the key before was g

    @property
    def chosen_key(self) -> str | None:
        """The key of the row under the cursor; None: there is no row."""
        return self.kind.key(self.rows[self.cursor]) if self.rows else None

    def open(self, kind: ListKind, rows: Sequence[Row]) -> None:
        """Show another list, from its first row."""
        self.kind, self.rows, self.cursor = kind, [], 0
        self.update_rows(rows)

    def update_rows(self, rows: Sequence[Row]) -> None:
        """Show these rows; the cursor stays on its row."""
        key = self.chosen_key
        self._all = rows
        column, is_descending = self._sorting.get(self.kind.name, (0, False))
        found = [row for row in rows if self.filter in self._text(row)] if self.filter else list(rows)
        self.rows = sorted(found, key=self.kind.columns[column].key, reverse=is_descending)
        keys = [self.kind.key(row) for row in self.rows]
        self.cursor = keys.index(key) if key in keys else min(self.cursor, max(0, len(keys) - 1))
        width = sum(column.width + 1 for column in self.kind.columns)
        self.virtual_size = Size(width, len(self.rows) + 1)
        self.refresh()

    def set_filter(self, text: str) -> None:
        """Show the rows that contain a text."""
        self.filter = text.strip().lower()
        self.update_rows(self._all)

    def _text(self, row: Row) -> str:
        return " ".join(str(column.cell(row)) for column in self.kind.columns).lower()

    def render_line(self, y: int) -> Strip:
        """Return one line of the screen, counted from the top of the widget."""
        if y == 0:
            style = self.get_component_rich_style("head")
            sorted_, is_descending = self._sorting.get(self.kind.name, (0, False))
            mark = "\u25bc" if is_descending else "\u25b2"
            names = [
                f"{column.name}{mark}" if index == sorted_ else column.name
                for index, column in enumerate(self.kind.columns)
            ]
            return self._strip(names, style)
        index = y - 1 + self.scroll_offset.y
        if index >= len(self.rows):
            return Strip.blank(self.size.width, self.rich_style)
        is_current = index == self.cursor and self.has_focus
        style = self.rich_style + Style(reverse=is_current)
        return self._strip([column.cell(self.rows[index]) for column in self.kind.columns], style)

    def _strip(self, cells: Sequence[Cell], style: Style) -> Strip:
        segments = []
        for column, cell in zip(self.kind.columns, cells, strict=True):
            text = Text(cell) if isinstance(cell, str) else cell.copy()
            text.truncate(column.width, overflow="ellipsis")
            text.align("right" if column.is_number else "left", column.width)
            segments += [*text.render(self.app.console), Segment(" ")]
        strip = Strip(Segment.apply_style(segments, style))
        return strip.crop_extend(self.scroll_offset.x, self.scroll_offset.x + self.size.width, style)

    def action_move(self, step: int) -> None:
        """Move the cursor by so many rows."""
        self._has_g = False
        self.cursor = max(0, min(len(self.rows) - 1, self.cursor + step))
        self.scroll_to_region(Region(0, self.cursor, 1, 2), animate=False, force=True)
        self.refresh()

    def action_half_page(self, direction: int) -> None:
        """Move the cursor by half of what is seen."""
        self.action_move(direction * max(1, self.size.height // 2))

    def action_first(self) -> None:
        """Move to the first row at the second g."""
        if self._has_g:
            self.action_move(-len(self.rows))
        else:
            self._has_g = True

    def action_sort(self) -> None:
        """Sort by the next column."""
        column = (self._sorting.get(self.kind.name, (0, False))[0] + 1) % len(self.kind.columns)
        self._sorting[self.kind.name] = column, self.kind.columns[column].is_number
        self.update_rows(self._all)

    def action_reverse(self) -> None:
        """Sort the other way round."""
        column, is_descending = self._sorting.get(self.kind.name, (0, False))
        self._sorting[self.kind.name] = column, not is_descending
        self.update_rows(self._all)

    def action_choose(self) -> None:
        """Tell the app that the row under the cursor was chosen."""
        if self.chosen_key is not None:
            self.post_message(self.Chosen(self.chosen_key))


class DetailsScreen(ModalScreen[None]):
    """Everything about one row."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape,h,left", "app.pop_screen"),
        Binding("j", "scroll(1)"),
        Binding("k", "scroll(-1)"),
    ]
    DEFAULT_CSS = """
    DetailsScreen { align: center middle; }
    DetailsScreen VerticalScroll { width: 90%; height: 90%; border: round $primary; padding: 0 1; }
    DetailsScreen Static { width: auto; }
    """

    def __init__(self, title: str, content: RenderableType) -> None:
        super().__init__()
        self._title = title
        self._content = content

    def compose(self) -> ComposeResult:
        """Yield the frame and its content."""
        frame = VerticalScroll(Static(self._content, markup=False))
        frame.border_title = self._title.replace("[", "\\[")
        yield frame

    def show(self, content: RenderableType) -> None:
        """Replace the content."""
        self.query_one(Static).update(content)

    def action_scroll(self, step: int) -> None:
        """Scroll by so many lines."""
        self.query_one(VerticalScroll).scroll_relative(y=step, animate=False)


class TopApp(App[None]):
    """`baton top`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("tab", "list(1)", "next list", priority=True),
        Binding("shift+tab", "list(-1)", priority=True),
        Binding("slash", "filter", "filter"),
        Binding("escape", "clear"),
    ]
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #tiles, #lists, #state { height: 1; padding: 0 1; }
    #charts { height: 4; }
    #charts Sparkline { width: 1fr; height: 3; margin: 0 1; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.open { display: block; }
    """

    def __init__(self, client: HttpClient) -> None:
        super().__init__()
        self._client = client
        self._points: deque[Point] = deque(maxlen=NUM_POINTS)
        self._requests: list[RequestSummary] = []
        self.snapshot: ClusterSnapshot | None = None
        # Kept here: an event may still come when the app ends and the screen has no widgets any more.
        self._tiles = Static("connecting", id="tiles", markup=False)
        self._tokens, self._ttft = Sparkline(id="tokens"), Sparkline(id="ttft")
        self._lists = Static(id="lists", markup=False)
        self.listing = Listing()
        self._filter = Input(id="filter", placeholder="filter", compact=True)
        self.state = Static(id="state", markup=False)

    def compose(self) -> ComposeResult:
        """Yield the lines of the screen from the top."""
        yield self._tiles
        yield Horizontal(self._tokens, self._ttft, id="charts")
        yield self._lists
        yield self.listing
        yield self._filter
        yield self.state

    def on_mount(self) -> None:
        """Begin to follow the events."""
        self.listing.focus()
        self._name_lists()
        self.set_interval(REQUESTS_EVERY_S, self._refresh_requests)
        self.follow()

    # The thread.

    @work(thread=True)
    def follow(self) -> None:
        """Read events until the app ends; connect again when the connection is lost."""
        worker = get_current_worker()
        while not worker.is_cancelled:
            try:
                self._read_events(worker)
            except BatonError as error:
                self.call_from_thread(self._say, f"the connection is lost; connecting again ({error})")
            time.sleep(RETRY_S)

    def _read_events(self, worker: Worker[None]) -> None:
        """Hand on each event until the stream ends or the app does."""
        with contextlib.closing(self._client.events("GET", "/ui/events")) as events:
            for name, data in events:
                if worker.is_cancelled:
                    return
                self._taken(name, data)

    def _taken(self, name: str, data: bytes) -> None:
        if name == "history":
            self.call_from_thread(self._take_history, decoded(data, list[Point]))
        elif name == "snapshot":
            self.call_from_thread(self.take, decoded(data, ClusterSnapshot))

    @work(thread=True, exclusive=True, group="requests")
    def ask_requests(self) -> None:
        """Ask for the slowest requests."""
        try:
            route = f"/admin/requests?order=slowest&limit={NUM_REQUESTS}"
            found = self._client.read_json(route, Requests).data
        except BatonError as error:
            self.call_from_thread(self._say, str(error))
        else:
            self.call_from_thread(self._take_requests, found)

    @work(thread=True, exclusive=True, group="request")
    def ask_request(self, screen: DetailsScreen, request_id: str, names: Mapping[str, str]) -> None:
        """Ask for the timeline of a request, and how it was routed."""
        try:
            content = Group(*_request_parts(self._client, request_id, dict(names)))
        except (BatonError, msgspec.MsgspecError) as error:
            content = Group(Text(f"the request cannot be shown: {error}"))
        self.call_from_thread(screen.show, content)

    # The app's own thread.

    def take(self, snapshot: ClusterSnapshot) -> None:
        """Show a snapshot."""
        self.snapshot = snapshot
        self._points.append(snapshot.point)
        self._tiles.update(_tiles(snapshot))
        self._tokens.data = [point.tokens_per_s for point in self._points]
        self._ttft.data = [point.ttft_s[-1] if point.ttft_s else 0.0 for point in self._points]
        self._say(f"{snapshot.model}, Baton {snapshot.version}; sparklines: tokens/s, TTFT p99")
        if self.listing.kind is not REQUESTS:
            self.listing.update_rows(self._rows(self.listing.kind))

    def _take_history(self, points: list[Point]) -> None:
        self._points.clear()
        self._points.extend(points)

    def _take_requests(self, requests: list[RequestSummary]) -> None:
        self._requests = requests
        if self.listing.kind is REQUESTS:
            self.listing.update_rows(requests)

    def _rows(self, kind: ListKind) -> Sequence[Row]:
        if self.snapshot is None:
            return ()
        rows: dict[str, Sequence[Row]] = {
            "workers": self.snapshot.workers,
            "tenants": self.snapshot.tenants,
            "requests": self._requests,
        }
        return rows[kind.name]

    def _say(self, text: str) -> None:
        self.state.update(text)

    def _name_lists(self) -> None:
        text = Text("  ").join(
            Text(each.name, "reverse" if each is self.listing.kind else "") for each in LISTS
        )
        self._lists.update(text)

    def action_list(self, step: int) -> None:
        """Open the next list."""
        if len(self.screen_stack) > 1:  # details are open
            return
        next_ = LISTS[(LISTS.index(self.listing.kind) + step) % len(LISTS)]
        self.listing.open(next_, self._rows(next_))
        self._name_lists()
        self._refresh_requests()

    def _refresh_requests(self) -> None:
        if self.listing.kind is REQUESTS:
            self.ask_requests()

    def action_filter(self) -> None:
        """Open the field of the filter."""
        if len(self.screen_stack) == 1:
            self._filter.add_class("open")
            self._filter.focus()

    def action_clear(self) -> None:
        """Show all rows."""
        self._filter.value = ""
        self._filter.remove_class("open")
        self.listing.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the text is typed."""
        self.listing.set_filter(event.value)

    def on_input_submitted(self) -> None:
        """Go back to the rows; the filter stays."""
        self.listing.focus()

    def on_listing_chosen(self, event: Listing.Chosen) -> None:
        """Open the details of a row."""
        assert self.snapshot is not None
        names = {each.id: each.name for each in self.snapshot.workers}
        if self.listing.kind is REQUESTS:
            screen = DetailsScreen(f"request {event.key}", "asking")
            self.push_screen(screen)
            self.ask_request(screen, event.key, names)
            return
        row = self.listing.rows[self.listing.cursor]
        parts = _worker_parts(row, names) if isinstance(row, WorkerRow) else _tenant_parts(row)
        self.push_screen(DetailsScreen(str(self.listing.kind.columns[0].cell(row)), Group(*parts)))


def _tiles(snapshot: ClusterSnapshot) -> Text:
    point = snapshot.point
    p50, _, p99 = point.ttft_s or (None, None, None)
    tiles = {
        "calls": count(point.num_open),
        "req/s": f"{point.requests_per_s:.1f}",
        "tok/s": count(point.tokens_per_s),
        "TTFT p50": seconds(p50),
        "p99": seconds(p99),
        "ITL p99": seconds(point.itl_s[-1] if point.itl_s else None),
        "queued": count(point.num_queued),
        "overload": snapshot.level.replace("_", " "),
    }
    parts = [Text.assemble((value, "bold"), " ", (name, "dim")) for name, value in tiles.items()]
    return Text("   ").join(parts)


def _worker_parts(row: WorkerRow, names: Mapping[str, str]) -> Iterator[RenderableType]:
    for name, value in msgspec.structs.asdict(row).items():
        if name == "sent_to":
            value = ", ".join(
                f"{names.get(to, short_id(to))} {rate / 1e6:.1f} MB/s" for to, rate in value.items()
            )
        yield _field(name, value)


def _tenant_parts(row: TenantRow) -> Iterator[RenderableType]:
    for part in (row.status, row.counts):
        for name, value in msgspec.structs.asdict(part).items():
            yield _field(name, value)


def _field(name: str, value: object) -> Text:
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {count_}" for key, count_ in value.items())
    elif isinstance(value, float):
        value = f"{value:.4g}"
    return Text.assemble((f"{name.replace('_', ' '):24}", "dim"), str(value) or "-")


def _request_parts(client: HttpClient, request_id: str, names: dict[str, str]) -> Iterator[RenderableType]:
    timeline = _loaded(client, f"/admin/requests/{request_id}")
    if timeline is not None:
        timeline.pop("seconds", None)
        yield from map(_plain, waterfall(msgspec.convert(timeline, RequestTimeline)))
    decisions = _loaded(client, f"/admin/decisions/{request_id}")
    for told in decisions["data"] if decisions is not None else ():
        told.pop("regret_s", None)
        yield Text()
        yield from map(_plain, parts_of(msgspec.convert(told, Decision), names))
    if timeline is None and decisions is None:
        yield Text("the request runs, or it ended too long ago")


def _plain(part: RenderableType) -> RenderableType:
    return Text(part) if isinstance(part, str) else part


def _loaded(client: HttpClient, route: str) -> dict[str, Any] | None:
    """Return the JSON of a path; None when the gateway does not know the request. Raises BatonError."""
    try:
        return client.read_json(route, dict[str, Any])
    except InvalidRequest:
        return None


def _run(arguments: argparse.Namespace) -> None:
    output.check()
    client = HttpClient(url_of(arguments), timeout_s=SILENCE_S)
    client.read("/load")  # reports a wrong address or key before the screen opens
    TopApp(client).run()


top = CliCommand(__doc__, add_url_options, _run)
