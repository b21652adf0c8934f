"""How a report's page looks."""

from __future__ import annotations

from amp_patch.comparison.drawing import COLOURS


def style() -> str:
    """Every colour as a variable, and the rules; on paper the light colours."""
    light, dark = ("; ".join(f"--{name}: {pair[i]}" for name, pair in COLOURS.items()) for i in (0, 1))
    return (
        f"\n:root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}{_RULES}"
    )


_RULES = """
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100% }
main { max-width: 1240px; margin: 0 auto; padding: 20px 20px 40px }
header p { margin: 0 0 12px; color: var(--soft); font-size: 0.93rem }
header strong { color: var(--ink); font-weight: 600 }
h1 { font-size: 2.1rem; line-height: 1.15; letter-spacing: -0.02em; margin: 0 0 8px }
.best h1 { color: var(--good) }
h2 { font-size: 1rem; margin: 0; display: inline }
h3 { font-size: 0.95rem; margin: 22px 0 6px }
p, ul { margin: 8px 0 } ul { padding-left: 20px }
small, .soft { color: var(--soft); font-size: 0.87rem }
.card { display: grid; grid-template-columns: minmax(0, 5fr) minmax(0, 9fr); gap: 8px 36px; background: var(--card);
  border: 1px solid var(--line); border-radius: 12px; padding: 24px 26px }
.gains { font-size: 1.28rem; line-height: 1.35; font-weight: 600; margin: 0 0 14px }
.said dt { color: var(--soft); font-size: 0.87rem; margin-top: 10px } .said dd { margin: 0 }
.said { display: block; margin: 0 }
code, pre { font: 0.87rem/1.5 ui-monospace, monospace }
.row { display: grid; grid-template-columns: 9.2em minmax(0, 1fr) minmax(0, 1fr) minmax(0, 1.35fr); gap: 0 20px;
  padding: 0 12px; margin: 0 -12px }
.row.best { background: var(--tint); border-radius: 8px }
.row > div { align-self: center; line-height: 1.2 }
.row > svg { display: block; width: 100%; height: 52px; overflow: visible }
.row > .axis { grid-column: 4; height: 16px }
.row small { display: block; font-size: 0.8rem }
.row.best small, .row.best b { color: var(--good) } .row.best small { font-weight: 600 }
.row.bad small, .bad b { color: var(--lost) } .row.unsure small { color: var(--unsure) }
.head > div { align-self: end; padding-bottom: 8px }
.failed { grid-column: 2 / -1; color: var(--lost) }
.finding { font-weight: 600 } .finding.best { color: var(--good) } .finding.bad { color: var(--lost) }
.finding.unsure { color: var(--unsure) }
.scroll { overflow-x: auto; margin: 14px 0; max-width: 100% }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--time); outline-offset: 2px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem }
main > .scroll table { width: 100% }
th, td { padding: 6px 16px 6px 0; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line);
  white-space: nowrap; overflow-wrap: normal }
th:last-child, td:last-child { padding-right: 0 }
th:first-child, td:first-child, td.text, th.text { text-align: left }
td.text { white-space: normal; min-width: 16em; overflow-wrap: anywhere }
th[scope=row] { position: sticky; left: 0; background: var(--paper) }
.named th[scope=row] { position: static; white-space: normal; overflow-wrap: anywhere; min-width: 18em }
.named thead th { max-width: 9em }
thead th { color: var(--soft); font-weight: 600; border-bottom-color: var(--soft); vertical-align: bottom;
  white-space: normal; min-width: 4em }
td small { display: block; white-space: normal; width: max-content; max-width: 16em; margin-left: auto }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px }
.stack { display: block; width: 340px; height: 22px }
details { border-top: 1px solid var(--line); padding: 9px 0 }
details:last-of-type { border-bottom: 1px solid var(--line) }
details[open] { padding-bottom: 18px }
summary { cursor: pointer } summary small { margin-left: 6px }
details > p { max-width: 80ch }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 275px), 1fr)); gap: 18px 28px;
  align-items: start; margin: 12px 0 }
figure { margin: 0; break-inside: avoid }
figure > svg { display: block; width: 100%; height: auto }
svg text { font-family: system-ui, sans-serif }
pre { background: var(--card); border-radius: 6px; padding: 10px 14px; margin: 8px 0; white-space: pre-wrap }
details dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 4px 18px; max-width: 84ch }
dt { color: var(--soft) } dd { margin: 0 }
@media (max-width: 1080px) { .card { display: block } .rows { margin-top: 18px } }
@media (max-width: 640px) {
  main { padding: 14px 12px 28px }
  .card { padding: 16px 14px }
  h1 { font-size: 1.75rem } .gains { font-size: 1.12rem }
  .row { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); padding: 4px 10px; margin: 0 -10px }
  .row > div:first-child { grid-column: 1 / -1 } .row small { display: inline; margin-left: 6px }
  .row > svg { height: 28px } .row > svg:last-child { grid-column: 1 / -1 }
  .head > div:first-child { display: none } .head > div { padding: 0 0 5px }
  .head > div:last-child { grid-column: 1 / -1 } .head small { display: block; margin: 0 }
  .failed { grid-column: 1 / -1 }
  details dl { display: block } details dd { margin-bottom: 8px }
  .named th[scope=row] { min-width: 11em }
}
@media print {
  main { max-width: none; padding: 0 } :root { font-size: 11px } body { font-size: 1rem }
  .scroll { overflow: visible }
  th, td, .named th[scope=row] { padding-right: 8px; white-space: normal; min-width: 0 } td small { width: auto }
  .card { break-inside: avoid } .stack { width: 160px }
  details::details-content { content-visibility: visible; display: block }
  td.text { min-width: 9em } h2, h3 { break-after: avoid } tr { break-inside: avoid }
}
"""
