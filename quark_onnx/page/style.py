"""The style sheet of pages, light and dark, wide and narrow, without external files."""

CSS = """
:root {
  color-scheme: light dark;
  --ground: #fbfbfa; --card: #ffffff; --ink: #1d2126; --soft: #5b636d; --faint: #8a929c; --line: #e3e5e8;
  --band: #eef3f8; --bad: #c2410c; --badsoft: #fdeee6; --accent: #2563a8; --code: #f1f2f4;
  --product: #2563a8; --activation: #c77800; --normal: #8b3fa0; --arithmetic: #2f855a; --reduce: #b83280;
  --move: #707884; --input: #0e8a9c; --good: #2f855a; --risky: #b7791f; --poor: #c2410c; --unknown: #707884;
  --shade: rgba(0, 0, 0, 0.16);
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171b; --card: #1b1f24; --ink: #e6e8eb; --soft: #a6aeb8; --faint: #7b848f; --line: #2d333b;
    --band: #212b37; --bad: #fb8a55; --badsoft: #3a241a; --accent: #6fa8e8; --code: #262b32;
    --product: #6fa8e8; --activation: #f0b042; --normal: #c78ad9; --arithmetic: #6cc495; --reduce: #ee86b9;
    --move: #9aa3ae; --input: #4fc3d4; --good: #6cc495; --risky: #f0b042; --poor: #fb8a55; --unknown: #9aa3ae;
    --shade: rgba(0, 0, 0, 0.6);
  }
}
.series-0 { --own: var(--product); } .series-1 { --own: var(--activation); } .series-2 { --own: var(--arithmetic); }
.series-3 { --own: var(--normal); } .series-4 { --own: var(--reduce); } .series-5 { --own: var(--input); }
.series-6 { --own: var(--move); }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 64px; }
header p, .note { color: var(--soft); }
h1 { font-size: 27px; line-height: 1.2; font-weight: 650; letter-spacing: -0.015em; margin: 0 0 4px; }
h2 { font-size: 18px; font-weight: 650; letter-spacing: -0.005em; margin: 48px 0 4px; }
p { margin: 0 0 12px; max-width: 72ch; }
.names { overflow-wrap: anywhere; margin-bottom: 24px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 1px; margin: 0;
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.facts div { outline: 1px solid var(--line); padding: 14px 16px; }
.facts dt { color: var(--soft); font-size: 13px; }
.facts dd { margin: 2px 0 0; font-size: 22px; font-weight: 600; letter-spacing: -0.01em; }
.facts small { display: block; font-size: 13px; font-weight: 400; letter-spacing: 0; color: var(--soft);
  overflow-wrap: anywhere; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; }
svg text { fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--faint); stroke-width: 1; }
svg .thread { fill: none; stroke: var(--faint); stroke-width: 1; opacity: 0.45; }
svg .alone { fill: none; stroke: var(--faint); stroke-width: 1.2; }
svg .worst { stroke: var(--bad); stroke-width: 2; }
svg .final { stroke: var(--bad); stroke-width: 1.2; stroke-dasharray: 4 3; }
svg text.rank { paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
svg text.rank { fill: var(--bad); font-weight: 650; }
svg .band { fill: var(--band); }
svg .end { stroke: var(--accent); stroke-width: 1.5; }
svg .bar { fill: var(--accent); opacity: 0.75; }
svg .cut { fill: var(--bad); }
svg .code { stroke: var(--accent); stroke-width: 1; opacity: 0.6; }
svg text.edge { fill: var(--accent); font-weight: 600; }
.product { fill: var(--product); background: var(--product); }
.activation { fill: var(--activation); background: var(--activation); }
.normal { fill: var(--normal); background: var(--normal); }
.arithmetic { fill: var(--arithmetic); background: var(--arithmetic); }
.reduce { fill: var(--reduce); background: var(--reduce); }
.move { fill: var(--move); background: var(--move); }
.input { fill: var(--input); background: var(--input); }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 12px 0 0; padding: 0; font-size: 13px;
  color: var(--soft); }
svg .float { fill: none; stroke: var(--faint); stroke-width: 2.5; } svg .quantized { fill: none; stroke: var(--accent); stroke-width: 1.2; }
svg .point { fill: var(--card); stroke: var(--faint); stroke-width: 1.4; }
svg .front { fill: var(--accent); stroke: var(--accent); } svg .best { fill: var(--good); stroke: var(--good); }
svg polyline.front { fill: none; }
svg .filled { fill: var(--own); } svg .hollow { fill: none; stroke: var(--own); stroke-width: 1.2; }
svg .stem { stroke: var(--own); stroke-width: 1.2; opacity: 0.5; }
svg .whole { stroke: var(--own); stroke-width: 2.4; } svg .was { stroke-dasharray: 3 3; stroke-width: 1.4; }
svg .cell { fill: var(--accent); } svg .none { fill: none; stroke: var(--bad); stroke-width: 1; }
svg .npu { fill: var(--arithmetic); opacity: 0.16; } svg .cpu { fill: var(--activation); opacity: 0.2; }
svg .abort { fill: var(--bad); opacity: 0.3; } svg .ground { fill: var(--card); }
svg text.name { fill: var(--ink); font-weight: 600; } svg .link { fill: none; stroke: var(--faint); stroke-width: 1.2; }
figure svg + svg.wide { margin-top: 16px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 20px 28px; }
.pair svg { max-width: 520px; }
.key i { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 6px; }
.key i.own { background: var(--own); } .key i.front { background: var(--accent); } .key i.best { background: var(--good); }
.key i.point { background: none; border: 1.4px solid var(--faint); }
.key i.most { background: var(--accent); border-radius: 0; }
.key i.bad { background: none; border: 1px solid var(--bad); border-radius: 0; }
.key i.ring { background: none; border: 1.5px solid var(--faint); }
.key i.dash { width: 18px; height: 0; border-radius: 0; border-top: 1.5px dashed var(--bad); vertical-align: 4px; }
code span:first-child { white-space: nowrap; }
.narrow { display: none; }
ol.rank { list-style: none; margin: 16px 0 0; padding: 0; display: grid; gap: 12px; }
.head { display: grid; grid-template-columns: 32px minmax(0, 1fr) auto; gap: 0 8px; align-items: start; }
.head .place { color: var(--faint); font-size: 18px; font-weight: 600; line-height: 1.35; }
.head h3 { margin: 0; font: 600 14px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  overflow-wrap: anywhere; }
.head .what { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.ratios { display: flex; gap: 20px; margin: 0; text-align: right; }
.ratios dt { color: var(--soft); font-size: 12px; }
.ratios dd { margin: 0; font-weight: 600; white-space: nowrap; }
.ratios dd span { color: var(--faint); font-weight: 400; }
.causes { list-style: none; margin: 12px 0 0; padding: 0 0 0 40px; display: grid; gap: 10px; }
.causes li { display: grid; grid-template-columns: 56px minmax(0, 1fr); gap: 0 14px; }
.share { margin-top: 9px; height: 6px; border-radius: 3px; background: var(--line); overflow: hidden; }
.share i { display: block; height: 100%; background: var(--bad); border-radius: 3px; }
.causes p { margin: 0; overflow-wrap: anywhere; }
.causes .remedy { color: var(--soft); font-size: 14px; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--code); color: var(--ink);
  padding: 1px 6px; border-radius: 4px; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 20px 28px;
  margin: 16px 0 0; padding: 16px 0 0; border-top: 1px solid var(--line); }
.plots figcaption { font-size: 13px; color: var(--soft); overflow-wrap: anywhere; margin-bottom: 4px; }
.plots figcaption b { color: var(--ink); font-weight: 600; }
.plots figcaption em { color: var(--bad); font-style: normal; }
.plots svg { max-width: 460px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { text-align: left; padding: 6px 10px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; }
/* A shadow at each end of a table that scrolls, covered by the card's own colour where the table ends. */
.scroll { overflow-x: auto; background:
  linear-gradient(to right, var(--card) 30%, transparent) left / 40px 100% no-repeat local,
  linear-gradient(to left, var(--card) 30%, transparent) right / 40px 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / 12px 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) right / 12px 100% no-repeat scroll, var(--card); }
.scroll table { min-width: 640px; } .scroll table.slim { min-width: 0; }
.scroll td, .scroll th { overflow-wrap: normal; white-space: pre-line; }
.scroll .long { display: inline-block; min-width: 16em; overflow-wrap: anywhere; }
.slim td { overflow-wrap: anywhere; } .slim :is(td, th):first-child { min-width: 6em; }
.scroll .number { text-align: right; white-space: nowrap; }
.scroll .number + :not(.number) { padding-left: 12px; }
tr:last-child > td { border-bottom: 0; }
td details { margin: 0; }
.titled { font-size: 13px; } .titled td { border: 0; border-top: 1px solid var(--line); color: var(--soft); padding: 4px 10px 4px 0; }
.titled td:first-child { color: var(--ink); font: 12px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.titled td:nth-child(-n + 3) { white-space: nowrap; } .titled .more td { border-top: 0; padding-top: 0; }
.titled b { color: var(--ink); font-weight: 600; }
.titled th[scope=rowgroup] { color: var(--ink); font-weight: 600; padding-top: 16px; border: 0; }
.verdict { margin: 0 0 20px; padding: 14px 18px; border-radius: 10px; background: var(--card);
  border: 1px solid var(--line); border-left: 5px solid var(--own); }
.facts + .verdict, section + .facts { margin-top: 32px; }
.verdict + .facts { margin-top: 0; }
.verdict.good { --own: var(--good); } .verdict.risky { --own: var(--risky); }
.verdict.poor { --own: var(--poor); } .verdict:is(.unclear, .unknown) { --own: var(--unknown); }
.verdict p { margin: 0; font-size: 17px; color: var(--ink); max-width: none; overflow-wrap: anywhere; } .verdict b { color: var(--own); margin-right: 4px; }
.verdict h2 { font-size: 13px; font-weight: 500; color: var(--soft); margin: 12px 0 4px; }
.verdict ol { margin: 0; padding-left: 20px; display: grid; gap: 4px; }
.verdict code span { white-space: nowrap; }
.verdict li { overflow-wrap: anywhere; }
.verdict small { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.verdict > small { display: block; margin-top: 4px; }
details { margin-top: 12px; }
summary { cursor: pointer; color: var(--soft); }
details ul { margin: 8px 0 0; padding-left: 20px; font-size: 13px; color: var(--soft); overflow-wrap: anywhere; }
.read { margin: 8px 0 0; padding: 0; display: grid; gap: 8px; color: var(--soft); font-size: 14px; }
.read dt { color: var(--ink); font-weight: 600; float: left; margin-right: 8px; }
.read dd { margin: 0; max-width: 80ch; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: 16px; margin-top: 12px; }
.gallery figcaption { font-size: 13px; color: var(--soft); margin-bottom: 6px; overflow-wrap: anywhere; }
.gallery .row { display: flex; gap: 8px; } .gallery .row div { flex: 1 1 0; min-width: 0; font-size: 12px; color: var(--soft); }
.gallery img { display: block; width: 100%; image-rendering: auto; border-radius: 4px; }
.notes { margin: 8px 0 0; padding-left: 20px; } .notes li { margin-bottom: 4px; overflow-wrap: anywhere; }
pre { margin: 0; overflow-x: auto; font-size: 13px; } h2 { scroll-margin-top: 12px; }
@media (max-width: 680px) {
  main { padding: 24px 14px 48px; }
  h1 { font-size: 23px; }
  .facts { grid-template-columns: 1fr 1fr; }
  .facts div:last-child:nth-child(odd) { grid-column: span 2; }
  .wide { display: none; }
  .narrow { display: block; }
  .head { grid-template-columns: 24px minmax(0, 1fr); }
  .ratios { grid-column: 2; text-align: left; margin-top: 8px; flex-wrap: wrap; gap: 4px 18px; }
  .causes { padding-left: 0; }
}
@media (max-width: 680px) {
  /* A row becomes a block of lines, each with the name of its column. */
  .scroll table.titled, .titled tbody, .titled tr, .titled td, .titled th { display: block; min-width: 0; }
  .titled thead, .titled td:empty { display: none; }
  .scroll .titled td:nth-child(n) { white-space: normal; overflow-wrap: anywhere; text-align: left; border: 0; padding: 1px 0; }
  .titled td:not(:first-child)::before { content: attr(data-column) ": "; color: var(--faint); }
  .titled tr { border-top: 1px solid var(--line); padding: 4px 0; } .titled tr.more { border: 0; padding: 0; }
}
@media print { .card { break-inside: avoid; } }
"""
