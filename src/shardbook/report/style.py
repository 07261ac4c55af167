"""The page's style sheet: two papers, one column, and wide tables that scroll in boxes of their own."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --box: #f5f7f9; --bad: #b3121d; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --ink: #e8ebef; --soft: #a3adb8; --line: #373d45; --box: #1d2127; --bad: #ff8f8a; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 15px; }
main { max-width: 944px; margin: 0 auto; padding: 24px 32px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 44px 0 8px; padding-top: 14px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 24px 0 6px; overflow-wrap: anywhere; }
p { margin: 6px 0; max-width: 76ch; overflow-wrap: anywhere; }
.soft, figcaption, caption { color: var(--soft); }
.bad { color: var(--bad); font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 10px; margin: 18px 0 6px; padding: 0; }
.cards div { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.cards dt { color: var(--soft); font-size: 13px; }
.cards dd { margin: 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.cards small { display: block; font-size: 12.5px; font-weight: 400; color: var(--soft); }
figure { margin: 14px 0 18px; }
figcaption { font-size: 13.5px; margin-top: 4px; overflow-wrap: anywhere; }
figure svg { display: block; width: 100%; height: auto; }
.narrow { display: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; list-style: none; padding: 0; margin: 8px 0; font-size: 13px; }
.legend li { overflow-wrap: anywhere; }
.swatch { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border: 1px solid var(--soft); border-radius: 2px;
  vertical-align: -1px; }
.scroll { overflow-x: auto; margin: 10px 0 14px; }
.scroll:focus-visible { outline: 2px solid var(--soft); }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-size: 13.5px; padding-bottom: 4px; }
th, td { text-align: left; vertical-align: top; white-space: nowrap; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
tbody th { font-weight: 400; }
.number { text-align: right; }
.words { white-space: normal; min-width: 15em; overflow-wrap: anywhere; }
.sum th, .sum .number { font-weight: 600; }
code { font-family: ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; font-size: 0.92em; }
@media (max-width: 640px) {
  main { padding: 16px 16px 48px; }
  h1 { font-size: 22px; }
  .cards { grid-template-columns: 1fr 1fr; }
  .figures .words { white-space: nowrap; }
  .wide { display: none; }
  .narrow { display: block; }
}
@media print { .scroll { overflow: visible; } }
"""
