"""What TensorBoard shows first: six pinned charts, the same six as a custom-scalars layout.

To delete: this file, its lines in lifecycle.py and summary.py.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from dist_amp.telemetry.tags import describe

PORT = 6006  # TensorBoard's own default

# A colour per rank of a single run; with --logdir runs one per run, since TensorBoard's seven can't tell 2 x 8 apart.
COLOURS = r"regex:^(.+)/tensorboard/|(rank\d+)$"


def main_tags(has_tokens: bool) -> dict[str, list[str]]:
    """{title: tags}: the charts to look at first. The first tag of each is pinned."""
    what = "tokens" if has_tokens else "items"
    return {
        "loss": ["train/loss", "eval/loss"],
        f"{what} per second, of each rank": [f"throughput/{what}_per_second"],
        "peak memory of each rank (GiB)": ["memory/peak_GiB"],
        "time of a step (s)": ["time/step_seconds"],
        "loss scale (power of 2)": ["amp/loss_scale_log2"],
        "skipped steps per interval": ["amp/skipped_in_interval"],
    }


def pinned_url(has_tokens: bool, port: int = PORT) -> str:
    """TensorBoard's address with the main charts pinned above all others, as its own pins write it."""
    cards = [{"plugin": "scalars", "tag": tags[0]} for tags in main_tags(has_tokens).values()]
    query = {
        "pinnedCards": json.dumps(cards, separators=(",", ":")),
        "runColorGroup": COLOURS,
        "smoothing": "0",  # its default of 0.6 makes steps and single peaks of scale and skips unreadable
    }
    return f"http://localhost:{port}/?{urlencode(query, safe=':,/', quote_via=quote)}#timeseries"


def watch_line(folder: Path, has_tokens: bool) -> str:
    """The banner's lines on how to watch a run, alone or beside others."""
    others = f"; beside other runs: --logdir {folder.parent}" if folder.parent.name else ""
    return f"watch  tensorboard --logdir {folder}/tensorboard{others}\n       {pinned_url(has_tokens)}"


def add_overview(step: int, has_tokens: bool) -> Callable[[Any], None]:
    """What writes the layout "Overview" of the custom-scalars dashboard with torch's SummaryWriter."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    charts = [
        layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[f"^{tag}$" for tag in tags]))
        for title, tags in main_tags(has_tokens).items()
    ]
    layout = layout_pb2.Layout(category=[layout_pb2.Category(title="Overview", chart=charts)])
    content = TensorProto(dtype="DT_STRING", string_val=[layout.SerializeToString()])
    value = Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, tensor=content, metadata=metadata.create_summary_metadata())
    return lambda writer: writer.file_writer.add_summary(Summary(value=[value]), step)


def described(values: Iterable[Any], about: str = "") -> Any:
    """A Summary of values with their units and meanings, as tensors. about: in place of what tags.py says.

    TensorBoard's default loader drops the description of any other value (tensorboard-data-server 0.7.2). The tensor
    stands before the same value in its usual form, for those who read the files with EventAccumulator.Scalars.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.data_compat import migrate_value

    summary = Summary()
    for value in values:
        if text := about or describe(value.tag):
            value = Summary.Value.FromString(value.SerializeToString())
            value.metadata.display_name, value.metadata.summary_description = value.tag, text
            summary.value.append(migrate_value(value))
    return summary
