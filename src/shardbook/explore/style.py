"""The notebook's style sheet: what reports have, in the ink and on the paper of the page around it."""

from html import escape

from shardbook.explore.runs import Outcome
from shardbook.report import markup

STYLE = """<style>
.sb { --paper: var(--background); --ink: currentColor; --soft: color-mix(in srgb, currentColor 68%, transparent);
  --line: color-mix(in srgb, currentColor 22%, transparent); --box: color-mix(in srgb, currentColor 5%, transparent); }
.sb p { margin: 6px 0; max-width: 105ch; overflow-wrap: anywhere; }
.sb .soft, .sb figcaption, .sb caption { color: var(--soft); }
.sb .verdict { font-size: 17px; font-weight: 600; }
.sb figure { margin: 10px 0 14px; padding: 0; }
.sb figcaption { font-size: 13.5px; margin-top: 4px; overflow-wrap: anywhere; text-align: left; }
.sb figure svg { display: block; width: 100%; height: auto; max-width: 880px; }
.sb .narrow { display: none; }
.sb .legend { display: flex; flex-wrap: wrap; gap: 4px 14px; list-style: none; padding: 0; margin: 8px 0; font-size: 13px; }
.sb .legend li { margin: 0; padding: 0; }
.sb .swatch { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border: 1px solid var(--soft); border-radius: 2px;
  vertical-align: -1px; }
.sb .scroll { overflow-x: auto; margin: 10px 0 14px; }
.sb .scroll:focus-visible { outline: 2px solid currentColor; }
.sb table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; width: auto; margin: 0; }
.sb caption { text-align: left; font-size: 13.5px; padding-bottom: 4px; caption-side: top; }
.sb th, .sb td { text-align: left; vertical-align: top; white-space: nowrap; padding: 4px 14px 4px 0; border: 0;
  border-bottom: 1px solid var(--line); background: none; }
.sb th { font-weight: 600; } .sb tbody th { font-weight: 400; }
.sb .number { text-align: right; }
.sb .words { white-space: normal; min-width: 15em; }
.sb .sum th, .sb .sum td { font-weight: 600; }
.sb .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 10px; margin: 10px 0; padding: 0; }
.sb .cards div { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; }
.sb .cards dt { color: var(--soft); font-size: 13px; font-weight: 400; margin: 0; }
.sb .cards dd { margin: 0; font-size: 18px; font-weight: 600; font-variant-numeric: tabular-nums; }
.sb .cards small { display: block; font-size: 12.5px; font-weight: 400; color: var(--soft); }
.sb-row { margin: 7px 0; }
.sb-name { display: flex; justify-content: space-between; gap: 12px; font-size: 13.5px; margin-bottom: 2px; }
.sb-total { font-variant-numeric: tabular-nums; }
.sb-bar { display: flex; position: relative; height: 26px; background: var(--box); }
.sb-box { box-sizing: border-box; height: 100%; overflow: hidden; font-size: 12px; line-height: 25px; white-space: nowrap;
  outline: 0.5px solid color-mix(in srgb, currentColor 60%, transparent); outline-offset: -0.5px; }
.sb-box span { padding-left: 6px; }
.sb-limit { position: absolute; top: -4px; bottom: -4px; width: 3px; margin-left: -1.5px; background: currentColor;
  box-shadow: 0 0 0 1.5px var(--paper); }
.sb-axis { position: relative; height: 20px; border-top: 1px solid var(--soft); margin-top: 8px; font-size: 12px; }
.sb-axis span { position: absolute; transform: translateX(-50%); padding-top: 2px; }
.sb-axis span:first-child { transform: none; } .sb-axis span:last-child { transform: translateX(-100%); }
.sb pre { white-space: pre; overflow-x: auto; background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: 10px 12px;
  font-size: 12.5px; line-height: 1.35; max-height: 480px; overflow-y: auto; margin: 6px 0; }
.sb pre.command { white-space: pre-wrap; overflow-wrap: anywhere; user-select: all; font-size: 13.5px; }
.sb .bad { font-weight: 600; }
@media (max-width: 640px) {
  .sb .wide { display: none; } .sb .narrow { display: block; }
  .sb .cards { grid-template-columns: 1fr; }
  .sb-box span { display: none; }
}
</style>"""


def page(*parts: str) -> str:
    """Markup under the notebook's style."""
    return f'<div class="sb">{"".join(part for part in parts if part)}</div>'


def line(words: str, kind: str = "") -> str:
    """A paragraph."""
    return markup.text("p", words, kind)


def command(words: str) -> str:
    """A command line to copy; one click selects it whole."""
    return markup.text("pre", words, "command")


def outcome(found: Outcome) -> str:
    """What a run printed."""
    how = f"ended well after {found.seconds:.1f} s" if found.ended_well else "this did not work"
    printed = f'<pre tabindex="0" role="region" aria-label="what the run printed">{escape(found.text)}</pre>'
    return command(found.typed) + line(how, "soft" if found.ended_well else "bad") + printed
