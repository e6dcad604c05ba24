//! Line plots as SVG.
//!
//! Fonts are not measured: text is anchored at its start, middle or end, and every place fits the
//! longest label. The first three colors are from Okabe and Ito (2008), which people with any color
//! vision can distinguish; lines also differ in their dashes. Each color has a light and a dark form,
//! chosen by the viewer's `prefers-color-scheme`. The background is part of the image, so that it is
//! readable on any page.

use std::fmt::Write as _;

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// `(x, y)` in ascending order of x. Points that are not finite are left out.
    pub points: Vec<(f64, f64)>,
    /// `(x, low, high)` of a shaded band.
    pub band: Vec<(f64, f64, f64)>,
    /// Whether points are marked with dots, which suits few points far apart.
    pub dots: bool,
}

/// One plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// The title above the plot.
    pub title: String,
    /// The label of the x axis.
    pub x_label: String,
    /// The label of the y axis, a unit.
    pub y_label: String,
    /// A horizontal line with its label.
    pub limit: Option<(f64, String)>,
    /// The lines, at least one.
    pub series: Vec<Series>,
}

const WIDTH: f64 = 720.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 40.0;
const PLOT: f64 = 220.0;
const UNDER: f64 = 56.0;
/// Height of a row of the legend.
const ROW: f64 = 18.0;
/// Columns of the legend.
const COLUMNS: usize = 3;
/// Maximum points of a line; more are averaged in equal shares.
const POINTS: usize = 400;
/// Number of colors; later series repeat them.
const COLORS: usize = 7;
const DASHES: [&str; 3] = ["", "7 3", "2 3"];
/// Maximum characters of a name in the legend.
const NAME: usize = 28;

const STYLE: &str = "
  .page { fill: #ffffff } text { fill: #24292f; font: 12px system-ui, sans-serif }
  .title { font-weight: 600; font-size: 14px } .grid { stroke: #d8dee4 } .axis { stroke: #6e7781 }
  .limit { stroke: #6e7781; stroke-dasharray: 4 4 } .line { fill: none; stroke-width: 2 }
  .band { fill-opacity: 0.18 }
  .s0 { stroke: #0072b2 } .s1 { stroke: #d55e00 } .s2 { stroke: #009e73 } .s3 { stroke: #aa4499 }
  .s4 { stroke: #b8860b } .s5 { stroke: #2f8fc7 } .s6 { stroke: #57606a }
  .f0 { fill: #0072b2 } .f1 { fill: #d55e00 } .f2 { fill: #009e73 } .f3 { fill: #aa4499 }
  .f4 { fill: #b8860b } .f5 { fill: #2f8fc7 } .f6 { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d } .axis { stroke: #8b949e }
    .limit { stroke: #8b949e }
    .s0 { stroke: #56b4e9 } .s1 { stroke: #ff8c42 } .s2 { stroke: #3fd0a4 } .s3 { stroke: #e08fc0 }
    .s4 { stroke: #f0e442 } .s5 { stroke: #8ecdf2 } .s6 { stroke: #adbac7 }
    .f0 { fill: #56b4e9 } .f1 { fill: #ff8c42 } .f2 { fill: #3fd0a4 } .f3 { fill: #e08fc0 }
    .f4 { fill: #f0e442 } .f5 { fill: #8ecdf2 } .f6 { fill: #adbac7 }
  }
";

/// The chart as an SVG document; `None` if no series has a finite point.
pub fn render(chart: &Chart) -> Option<String> {
    let series: Vec<Series> = chart.series.iter().map(thinned).collect();
    let xs = series.iter().flat_map(|s| s.points.iter().map(|p| p.0));
    let lines = series.iter().flat_map(|s| s.points.iter().map(|p| p.1));
    let bands = series.iter().flat_map(|s| s.band.iter().flat_map(|b| [b.1, b.2]));
    let limit = chart.limit.as_ref().map(|(y, _)| *y).filter(|y| y.is_finite());
    let x = Axis::over(xs, true)?;
    let y = Axis::over(lines.chain(bands).chain(limit), false)?;
    let legend = if series.len() > 1 { series.len().div_ceil(COLUMNS) } else { 0 };
    let height = TOP + PLOT + UNDER + ROW * legend as f64;
    let mut svg = String::new();
    let title = escape(&chart.title);
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\" aria-label=\"{title}\">\n<style>{STYLE}</style>\n\
         <rect class=\"page\" width=\"{WIDTH}\" height=\"{height}\"/>\n\
         <text class=\"title\" x=\"{LEFT}\" y=\"22\">{title}</text>\n"
    );
    axes(&mut svg, chart, &x, &y);
    let place = |px: f64, py: f64| format!("{:.1},{:.1}", x_at(&x, px), y_at(&y, py));
    for (index, series) in series.iter().enumerate() {
        draw(&mut svg, index, series, &place);
    }
    if let Some((value, label)) = &chart.limit {
        let at = y_at(&y, *value);
        let _ = write!(
            svg,
            "<line class=\"limit\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\n\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
            WIDTH - RIGHT,
            WIDTH - RIGHT - 4.0,
            at - 4.0,
            escape(label)
        );
    }
    if legend > 0 {
        names(&mut svg, &series);
    }
    svg.push_str("</svg>\n");
    Some(svg)
}

fn x_at(axis: &Axis, value: f64) -> f64 {
    LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)
}

fn y_at(axis: &Axis, value: f64) -> f64 {
    TOP + (1.0 - axis.share(value)) * PLOT
}

fn axes(svg: &mut String, chart: &Chart, x: &Axis, y: &Axis) {
    let (right, bottom) = (WIDTH - RIGHT, TOP + PLOT);
    for tick in &y.ticks {
        let at = y_at(y, *tick);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\n\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
            LEFT - 8.0,
            at + 4.0,
            y.label(*tick)
        );
    }
    for tick in &x.ticks {
        let at = x_at(x, *tick);
        let _ = write!(
            svg,
            "<line class=\"axis\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom}\" y2=\"{}\"/>\n\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
            bottom + 4.0,
            bottom + 18.0,
            x.label(*tick)
        );
    }
    let middle = TOP + PLOT / 2.0;
    let _ = write!(
        svg,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{bottom}\" y2=\"{bottom}\"/>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n\
         <text x=\"16\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {middle})\">{}</text>\n",
        (LEFT + right) / 2.0,
        bottom + 36.0,
        escape(&chart.x_label),
        escape(&chart.y_label)
    );
}

fn draw(svg: &mut String, index: usize, series: &Series, place: &dyn Fn(f64, f64) -> String) {
    let color = index % COLORS;
    if series.band.len() > 1 {
        let upper = series.band.iter().map(|(x, _, high)| place(*x, *high));
        let lower = series.band.iter().rev().map(|(x, low, _)| place(*x, *low));
        let outline: Vec<String> = upper.chain(lower).collect();
        let _ =
            writeln!(svg, "<polygon class=\"band f{color}\" points=\"{}\"/>", outline.join(" "));
    }
    let points: Vec<String> = series.points.iter().map(|(x, y)| place(*x, *y)).collect();
    if points.len() > 1 {
        let dash = dashes(index);
        let _ = writeln!(
            svg,
            "<polyline class=\"line s{color}\"{dash} points=\"{}\"/>",
            points.join(" ")
        );
    }
    // A line of a single point would be invisible.
    if series.dots || points.len() == 1 {
        for (x, y) in points.iter().filter_map(|p| p.split_once(',')) {
            let _ = writeln!(svg, "<circle class=\"f{color}\" cx=\"{x}\" cy=\"{y}\" r=\"3.5\"/>");
        }
    }
}

fn dashes(index: usize) -> String {
    match DASHES[index % DASHES.len()] {
        "" => String::new(),
        dash => format!(" stroke-dasharray=\"{dash}\""),
    }
}

fn names(svg: &mut String, series: &[Series]) {
    let column = (WIDTH - LEFT - RIGHT) / COLUMNS as f64;
    for (index, series) in series.iter().enumerate() {
        let x = LEFT + column * (index % COLUMNS) as f64;
        let y = TOP + PLOT + UNDER + ROW * (index / COLUMNS) as f64;
        let mut name: String = series.name.chars().take(NAME).collect();
        if name.len() < series.name.len() {
            name.push('…');
        }
        let _ = write!(
            svg,
            "<line class=\"line s{}\"{} x1=\"{x:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>\n",
            index % COLORS,
            dashes(index),
            x + 22.0,
            x + 28.0,
            y + 4.0,
            escape(&name)
        );
    }
}

/// A range with ticks at 1, 2 or 5 times a power of ten.
struct Axis {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
    decimals: usize,
}

impl Axis {
    /// The range of the finite values, `None` without any. A `tight` axis ends at the extreme values
    /// and has integer ticks; others end at ticks.
    fn over(values: impl Iterator<Item = f64>, tight: bool) -> Option<Self> {
        let range = values.filter(|v| v.is_finite()).fold(None, |range: Option<(f64, f64)>, v| {
            Some(range.map_or((v, v), |(low, high)| (low.min(v), high.max(v))))
        });
        let (mut low, mut high) = range?;
        if high - low <= high.abs().max(low.abs()) * 1e-9 {
            let margin = if tight || low == 0.0 { 1.0 } else { low.abs() * 0.5 };
            (low, high) = (low - margin, high + margin);
        }
        let about = (high - low) / 5.0;
        let power = 10f64.powf(about.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|f| f * power).into_iter().find(|s| *s >= about);
        let mut step = step.unwrap_or(10.0 * power);
        if tight {
            step = step.max(1.0);
        } else {
            (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
        }
        let first = (low / step - 1e-9).ceil();
        let count = ((high / step + 1e-9).floor() - first).clamp(0.0, 20.0) as usize;
        let ticks = (0..=count).map(|i| (first + i as f64) * step).collect();
        let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
        (low.is_finite() && high.is_finite()).then_some(Self { low, high, ticks, decimals })
    }

    fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    fn label(&self, tick: f64) -> String {
        // Avoids "-0".
        let tick = if tick.abs() < 1e-12 { 0.0 } else { tick };
        if self.decimals > 5 || tick.abs() >= 1e6 {
            format!("{tick:.0e}")
        } else {
            format!("{tick:.*}", self.decimals)
        }
    }
}

/// The finite points, averaged to at most [`POINTS`].
fn thinned(series: &Series) -> Series {
    let finite = |values: &[f64]| values.iter().all(|v| v.is_finite());
    let points: Vec<[f64; 2]> =
        series.points.iter().map(|p| [p.0, p.1]).filter(|p| finite(p)).collect();
    let band: Vec<[f64; 3]> =
        series.band.iter().map(|b| [b.0, b.1, b.2]).filter(|b| finite(b)).collect();
    Series {
        points: averaged(&points).into_iter().map(|[x, y]| (x, y)).collect(),
        band: averaged(&band).into_iter().map(|[x, low, high]| (x, low, high)).collect(),
        name: series.name.clone(),
        dots: series.dots,
    }
}

fn averaged<const N: usize>(values: &[[f64; N]]) -> Vec<[f64; N]> {
    let cells = values.len().min(POINTS);
    (0..cells)
        .map(|cell| {
            let share = &values[cell * values.len() / cells..(cell + 1) * values.len() / cells];
            std::array::from_fn(|i| share.iter().map(|v| v[i]).sum::<f64>() / share.len() as f64)
        })
        .collect()
}

/// Escapes element content or an attribute. Characters that XML forbids are left out.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => out.push(c),
        }
    }
    out
}
