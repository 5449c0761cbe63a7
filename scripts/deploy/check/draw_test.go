package check

import (
	"fmt"
	"image"
	"image/color"
	imagedraw "image/draw"
	"image/png"
	"io"
	"math"
	"slices"
	"testing"
	"time"

	"golang.org/x/image/font"
	"golang.org/x/image/font/basicfont"
	"golang.org/x/image/math/fixed"
)

// A panel of Grafana's grid has so many pixels for each unit.
const unitX, unitY = 50, 34

var (
	dark    = color.RGBA{17, 18, 23, 255}
	paper   = color.RGBA{28, 29, 34, 255}
	ink     = color.RGBA{210, 210, 220, 255}
	faint   = color.RGBA{60, 62, 70, 255}
	palette = []color.RGBA{
		{115, 191, 105, 255}, {242, 204, 12, 255}, {87, 148, 242, 255},
		{255, 120, 10, 255}, {242, 73, 92, 255}, {184, 119, 217, 255},
	}
	named = map[string]color.RGBA{
		"green": {115, 191, 105, 255}, "orange": {255, 152, 48, 255}, "red": {242, 73, 92, 255}, "text": ink,
	}
)

// canvas is the picture of one panel.
type canvas struct {
	*image.RGBA
	area image.Rectangle
}

func (c canvas) text(x, y int, text string, ink color.Color) {
	d := font.Drawer{Dst: c.RGBA, Src: image.NewUniform(ink), Face: basicfont.Face7x13, Dot: fixed.P(x, y)}
	d.DrawString(text)
}

func (c canvas) fill(r image.Rectangle, ink color.Color) {
	imagedraw.Draw(c.RGBA, r, image.NewUniform(ink), image.Point{}, imagedraw.Src)
}

// draw draws the panels as Grafana would, roughly.
func draw(t *testing.T, to io.Writer, all []panel, store scraped) error {
	height := 0
	for _, p := range all {
		height = max(height, p.GridPos.Y+p.GridPos.H)
	}
	picture := image.NewRGBA(image.Rect(0, 0, 24*unitX, height*unitY))
	imagedraw.Draw(picture, picture.Bounds(), image.NewUniform(dark), image.Point{}, imagedraw.Src)
	for _, p := range all {
		g := p.GridPos
		c := canvas{picture, image.Rect(g.X*unitX, g.Y*unitY, (g.X+g.W)*unitX, (g.Y+g.H)*unitY).Inset(3)}
		c.fill(c.area, paper)
		c.text(c.area.Min.X+8, c.area.Min.Y+16, p.Title, ink)
		c.area.Min.Y += 22
		switch p.Type {
		case "stat":
			c.stat(t, p, store)
		case "table":
			c.table(t, p, store)
		default:
			c.graph(t, p, store)
		}
	}
	return png.Encode(to, picture)
}

// stat draws the last value, in the colour of its threshold.
func (c canvas) stat(t *testing.T, p panel, store scraped) {
	for _, series := range store.query(t, p.Targets[0].Expr, 120, 120) {
		value := series.Floats[0].F
		ink := color.Color(ink)
		for _, step := range p.FieldConfig.Defaults.Thresholds.Steps {
			if value >= step.Value {
				ink = named[step.Color]
			}
		}
		c.fill(image.Rect(c.area.Min.X+8, c.area.Max.Y-14, c.area.Max.X-8, c.area.Max.Y-8), ink)
		c.text(c.area.Min.X+60, c.area.Min.Y+40, label(p, value), ink)
	}
}

func (c canvas) table(t *testing.T, p panel, store scraped) {
	for i, series := range store.query(t, p.Targets[0].Expr, 120, 120) {
		c.text(c.area.Min.X+8, c.area.Min.Y+20+16*i, series.Metric.String(), ink)
	}
}

// graph draws lines, and bars of five minutes; what is stacked, as the sums.
func (c canvas) graph(t *testing.T, p panel, store scraped) {
	defaults := p.FieldConfig.Defaults
	bars := defaults.Custom.DrawStyle == "bars"
	top := defaults.Max
	type line struct {
		name   string
		values [121]float64
	}
	var lines []line
	var sum [121]float64
	for _, target := range p.Targets {
		for _, series := range store.query(t, target.Expr, 0, 120) {
			l := line{name: legend(target.LegendFormat, series)}
			for i := range l.values {
				l.values[i] = math.NaN()
			}
			for _, point := range series.Floats {
				i := minute(point)
				if bars && i%5 > 0 {
					continue
				}
				l.values[i] = point.F
				if defaults.Custom.Stacking.Mode == "normal" {
					sum[i] += point.F
					l.values[i] = sum[i]
				}
				top = max(top, l.values[i])
			}
			lines = append(lines, l)
		}
	}
	plot := image.Rect(c.area.Min.X+60, c.area.Min.Y+6, c.area.Max.X-10, c.area.Max.Y-24)
	for i := range 3 {
		y := plot.Max.Y - plot.Dy()*i/2
		c.fill(image.Rect(plot.Min.X, y, plot.Max.X, y+1), faint)
		c.text(c.area.Min.X+8, y+4, label(p, top*float64(i)/2), ink)
	}
	height := func(value float64) int { return plot.Max.Y - int(value/max(top, 1e-9)*float64(plot.Dy())) }
	for _, step := range defaults.Thresholds.Steps {
		if y := height(step.Value); step.Value > 0 && y >= plot.Min.Y {
			c.fill(image.Rect(plot.Min.X, y, plot.Max.X, y+1), named[step.Color])
		}
	}
	x := plot.Min.X
	for n, l := range slices.Backward(lines) { // the lower bars are drawn over the higher ones
		ink := palette[n%len(palette)]
		before := -1
		for i, value := range l.values {
			if math.IsNaN(value) {
				before = -1
				continue
			}
			y := height(value)
			if bars {
				c.fill(image.Rect(plot.Min.X+plot.Dx()*(i-4)/121, y, plot.Min.X+plot.Dx()*i/121, plot.Max.Y), ink)
				continue
			}
			if before < 0 {
				before = y
			}
			left, right := plot.Min.X+plot.Dx()*i/121, plot.Min.X+plot.Dx()*(i+1)/121
			c.fill(image.Rect(left, min(y, before)-1, right, max(y, before)+1), ink)
			before = y
		}
		c.text(x, c.area.Max.Y-8, l.name, ink)
		x += 7*len(l.name) + 12
	}
}

// label returns a value in the panel's unit.
func label(p panel, value float64) string {
	switch p.FieldConfig.Defaults.Unit {
	case "s":
		return (time.Duration(value) * time.Second).String()
	case "percentunit":
		return fmt.Sprintf("%.0f%%", 100*value)
	}
	return fmt.Sprint(math.Round(10*value) / 10)
}
