"""Own the board's looks: write kvlease.json from `panels`, or with --check tell whether it is up to date.

`make board` runs it; it needs grafana-foundation-sdk, which `make test-deploy` installs.
"""

import sys
from itertools import count
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders import common as looks
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from panels import ROWS, Panel

FILE: Final = Path(__file__).with_name("kvlease.json")
SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
CHOSEN: Final = 'job=~"$job", instance=~"$instance"'
CHOSEN_CACHES: Final = f'{CHOSEN}, cache=~"$cache"'
WIDTH: Final = 24
STATS_A_ROW: Final = 8
PANELS_A_ROW: Final = 3
STAT_HEIGHT: Final = 4
PANEL_HEIGHT: Final = 8
ALL: Final = models.VariableOption(text="All", value="$__all", selected=True)


def board() -> str:
    """Return the board as JSON."""
    made = (
        dashboard.Dashboard("kvlease")
        .uid("kvlease")
        .description(
            "What the KV-cache daemons of a cluster do: pools, calls, leases, reuse, copies, processes."
        )
        .tags(["kvlease", "kv-cache", "inference"])
        .refresh("30s")
        .time("now-3h", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for name, query in (
        ("job", "label_values(kvlease_build_info, job)"),
        ("instance", 'label_values(kvlease_build_info{job=~"$job"}, instance)'),
        ("cache", f"label_values(kvlease_leases_max{{{CHOSEN}}}, cache)"),
    ):
        made = made.with_variable(_variable(name, query))
    ids = count(1)
    for title, panels in ROWS.items():
        made = made.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            shown = _stat(panel) if panel.is_stat else _graph(panel)
            made = made.with_panel(shown.id(next(ids)))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .query(query)
        .datasource(SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(ALL)
    )


def _stat(panel: Panel) -> stat.Panel:
    made = (
        stat.Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(SOURCE)
        .unit(panel.unit)
        .height(STAT_HEIGHT)
        .span(WIDTH // STATS_A_ROW)
        .thresholds(_thresholds(panel))
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(looks.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("no traffic" if _is_of_traffic(panel) else "nothing there")
    )
    for at, (legend, query) in enumerate(panel.queries.items()):
        made = made.with_target(_query(at, legend, query))
    return made


def _is_of_traffic(panel: Panel) -> bool:
    """Return whether a panel is empty as long as nobody calls; any other is where there is no cache, or no daemon."""
    return any("rate(" in query for query in panel.queries.values())


def _graph(panel: Panel) -> timeseries.Panel:
    stacking = common.StackingMode.NORMAL if panel.is_stacked else common.StackingMode.NONE
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(SOURCE)
        .unit(panel.unit)
        .min(0)
        .height(PANEL_HEIGHT)
        .span(WIDTH // PANELS_A_ROW)
        .line_width(1)
        .fill_opacity(30 if panel.is_stacked else 0)
        .stacking(looks.StackingConfig().mode(stacking))
        .thresholds(_thresholds(panel))
        .tooltip(looks.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
        .legend(
            looks.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if panel.warns_above is not None:
        made = made.thresholds_style(
            looks.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    for at, (legend, query) in enumerate(panel.queries.items()):
        made = made.with_target(_query(at, legend, query))
    return made


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    if panel.alarms_below is not None:
        steps = [
            models.Threshold(value=None, color="red"),
            models.Threshold(value=panel.alarms_below, color="green"),
        ]
        return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    steps = [models.Threshold(value=None, color="green")]
    for value, color in ((panel.warns_above, "yellow"), (panel.alarms_above, "red")):
        if value is not None:
            steps.append(models.Threshold(value=value, color=color))
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _query(at: int, legend: str, query: str) -> prometheus.Dataquery:
    expr = query.replace("@C", CHOSEN_CACHES).replace("@S", CHOSEN)
    return prometheus.Dataquery().ref_id(chr(ord("A") + at)).expr(expr).legend_format(legend)


def main() -> int:
    """Write the file, or check it."""
    made = board()
    if "--check" in sys.argv[1:]:
        return int(FILE.read_text() != made)
    FILE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
