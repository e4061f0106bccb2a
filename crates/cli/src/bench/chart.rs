//! Throughput and latency by block size, as SVG. The only file that knows how that is drawn.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::args::size_text;

/// What is drawn.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    /// Lines below it: the machine, the version, what the units mean.
    pub(crate) caption: Vec<String>,
    pub(crate) series: Vec<Series>,
}

/// One operation at one batch size.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    /// By block size.
    pub(crate) points: Vec<Point>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    pub(crate) block_bytes: u64,
    pub(crate) gigabytes_per_second: f64,
    pub(crate) p50_microseconds: f64,
    pub(crate) p99_microseconds: f64,
}

/// A line of one panel.
struct Line {
    name: String,
    color: RGBColor,
    dashed: bool,
    points: Vec<(f64, f64)>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (1100, 560);
const LINE_HEIGHT: u32 = 18;
const FONT: &str = "sans-serif";
/// How far an axis goes beyond the lowest and the highest value.
const MARGIN: f64 = 1.5;
/// Colours that people who see fewer of them can tell apart, too.
const COLORS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
    RGBColor(140, 140, 140),
];

impl Chart {
    /// The text of the file.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub(crate) fn to_svg(&self) -> Result<String> {
        let mut text = String::new();
        self.draw(&mut text).map_err(|error| anyhow!("the chart cannot be drawn: {error}"))?;
        Ok(text)
    }

    fn draw(&self, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let caption_height = LINE_HEIGHT * (self.caption.len() as u32 + 1);
        let (panels, caption) = root.split_vertically(SIZE.1.saturating_sub(caption_height));
        let (left, right) = panels.split_horizontally(SIZE.0 / 2);
        self.panel(&left, "Throughput", "GB/s", &self.throughput())?;
        self.panel(&right, "Latency of a batch", "µs", &self.latency())?;
        let style = (FONT, 13).into_text_style(&caption);
        for (line, text) in self.caption.iter().enumerate() {
            let y = LINE_HEIGHT as i32 * line as i32 + 4;
            caption.draw_text(text, &style, (12, y))?;
        }
        root.present()?;
        Ok(())
    }

    fn throughput(&self) -> Vec<Line> {
        self.lines("", false, |point| point.gigabytes_per_second)
    }

    fn latency(&self) -> Vec<Line> {
        let mut lines = self.lines(" p50", false, |point| point.p50_microseconds);
        lines.extend(self.lines(" p99", true, |point| point.p99_microseconds));
        lines
    }

    fn lines(&self, suffix: &str, dashed: bool, value: impl Fn(&Point) -> f64) -> Vec<Line> {
        let line = |(at, series): (usize, &Series)| Line {
            name: format!("{}{suffix}", series.name),
            color: COLORS[at % COLORS.len()],
            dashed,
            points: series.points.iter().map(|p| (p.block_bytes as f64, value(p))).collect(),
        };
        self.series.iter().enumerate().map(line).collect()
    }

    /// One pair of axes, both logarithmic, with its lines and their legend.
    fn panel(
        &self,
        area: &Area<'_>,
        title: &str,
        unit: &str,
        lines: &[Line],
    ) -> Result<(), Box<dyn std::error::Error>> {
        let points = || lines.iter().flat_map(|line| &line.points);
        let (x, y) = (range(points().map(|(x, _)| *x)), range(points().map(|(_, y)| *y)));
        let mut blocks: Vec<f64> = points().map(|(x, _)| *x).collect();
        blocks.sort_by(f64::total_cmp);
        blocks.dedup();
        let mut chart = ChartBuilder::on(area)
            .caption(format!("{title} by block size"), (FONT, 18))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(64)
            .build_cartesian_2d(x.log_scale().with_key_points(blocks), y.log_scale())?;
        chart
            .configure_mesh()
            .x_desc("block size")
            .y_desc(unit)
            .x_label_formatter(&|bytes| size_text(*bytes as u64))
            .y_label_formatter(&|value| plain_number(*value))
            .label_style((FONT, 12))
            .light_line_style(WHITE.mix(0.0))
            .draw()?;
        for line in lines {
            let style = line.color.stroke_width(2);
            let points = || line.points.iter().copied();
            let drawn = match line.dashed {
                true => chart.draw_series(DashedLineSeries::new(points(), 6, 4, style))?,
                false => chart.draw_series(LineSeries::new(points(), style))?,
            };
            let (color, dashed) = (line.color, line.dashed);
            drawn.label(&line.name).legend(move |(x, y)| {
                let end = if dashed { x + 8 } else { x + 20 };
                PathElement::new(vec![(x, y), (end, y)], color.stroke_width(2))
            });
            chart.draw_series(points().map(|point| Circle::new(point, 3, line.color.filled())))?;
        }
        chart
            .configure_series_labels()
            // Both rise with the block size.
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(200, 200, 200))
            .label_font((FONT, 12))
            .draw()?;
        Ok(())
    }
}

/// From below the lowest to above the highest value.
fn range(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    /// What is zero has no place on a logarithmic axis.
    const LEAST: f64 = 1e-9;
    let (mut low, mut high) = (f64::INFINITY, LEAST);
    for value in values {
        low = low.min(value.max(LEAST));
        high = high.max(value);
    }
    low.min(high) / MARGIN..high * MARGIN
}

/// Without an exponent, and without zeroes at the end.
fn plain_number(value: f64) -> String {
    if value >= 1.0 { format!("{value:.0}") } else { format!("{}", (value * 1e9).round() / 1e9) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, blocks: &[u64]) -> Series {
        let point = |block: &u64| Point {
            block_bytes: *block,
            gigabytes_per_second: *block as f64 / 1e5,
            p50_microseconds: 20.0,
            p99_microseconds: 80.0,
        };
        Series { name: name.into(), points: blocks.iter().map(point).collect() }
    }

    #[test]
    fn everything_is_in_the_file_and_nothing_breaks_its_markup() {
        let caption = vec!["tensorferry 0 on <CPU> & \"more\"".to_owned(), "GB: 10^9 bytes".into()];
        let both = vec![series("WRITE", &[4096, 65536, 1 << 20]), series("READ", &[4096, 1 << 20])];
        let text = Chart { caption, series: both }.to_svg().unwrap();
        for expected in [
            "<svg",
            "</svg>",
            "WRITE",
            "READ",
            "WRITE p50",
            "READ p99",
            "Throughput by block size",
            "Latency of a batch by block size",
            "GB/s",
            "µs",
            "4 KiB",
            "64 KiB",
            "1 MiB",
            "&lt;CPU&gt; &amp;",
            "GB: 10^9 bytes",
            "<circle",
            "<polyline",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert!(!text.contains("<CPU>"));
    }

    #[test]
    fn one_point_and_values_of_zero_can_be_drawn() {
        let mut one = series("READ", &[1]);
        one.points[0].gigabytes_per_second = 0.0;
        let text = Chart { caption: Vec::new(), series: vec![one] }.to_svg().unwrap();
        assert!(text.contains("READ"), "{text}");
    }

    #[test]
    fn axes_have_plain_numbers() {
        for (value, shown) in [(0.001, "0.001"), (0.1, "0.1"), (1.0, "1"), (10_000.0, "10000")] {
            assert_eq!(plain_number(value), shown);
        }
        let axis = range([2.0, 8.0].into_iter());
        assert_eq!((axis.start, axis.end), (2.0 / 1.5, 12.0));
    }
}
