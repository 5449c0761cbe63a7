// Package check tests the deployment files with the software that reads them: Prometheus, Helm, and
// the Kubernetes API types. It is a separate module, so that unwind's own module doesn't depend on
// this software.
package check

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/util/annotations"
)

// step is the interval at which Prometheus scrapes and evaluates rules.
const step = time.Minute

var promQL = parser.NewParser(parser.Options{})

// scraped contains the series that Prometheus has stored.
type scraped []storage.Series

// scrape stores the described series. A description is in promtool's notation, with one value for
// each step: `unwind_attachments{state="live"} 0+1x9` counts from 0 to 9. The value _ is a scrape
// without the metric.
func scrape(t *testing.T, descriptions ...string) scraped {
	t.Helper()
	var all scraped
	for _, description := range descriptions {
		lset, values, err := promQL.ParseSeriesDesc(description)
		if err != nil {
			t.Fatalf("%s: %v", description, err)
		}
		chunk := chunkenc.NewXORChunk()
		samples, err := chunk.Appender()
		must(t, err)
		for i, value := range values {
			if !value.Omitted {
				samples.Append(0, at(i).UnixMilli(), value.Value)
			}
		}
		all = append(all, &storage.SeriesEntry{Lset: lset, SampleIteratorFn: chunk.Iterator})
	}
	return all
}

func at(i int) time.Time { return time.Unix(0, 0).Add(time.Duration(i) * step) }

// query evaluates an expression at each step from first to last.
func (s scraped) query(t *testing.T, expr string, first, last int) promql.Matrix {
	t.Helper()
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 1 << 20, Timeout: time.Minute, Parser: promQL})
	q, err := engine.NewRangeQuery(context.Background(), s, nil, expr, at(first), at(last), step)
	if err != nil {
		t.Fatalf("%s: %v", expr, err)
	}
	defer q.Close()
	matrix, err := q.Exec(context.Background()).Matrix()
	if err != nil {
		t.Fatalf("%s: %v", expr, err)
	}
	copied := make(promql.Matrix, len(matrix)) // Close reuses the points
	for i, series := range matrix {
		copied[i] = promql.Series{Metric: series.Metric, Floats: append([]promql.FPoint(nil), series.Floats...)}
	}
	return copied
}

// Querier ignores the time range, because the engine drops the points outside of it.
func (s scraped) Querier(int64, int64) (storage.Querier, error) {
	find := func(_ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
		found := &seriesSet{}
		for _, series := range s {
			if matches(series.Labels(), matchers) {
				found.rest = append(found.rest, series)
			}
		}
		return found
	}
	return &storage.MockQuerier{SelectMockFunction: find}, nil
}

func matches(lset labels.Labels, matchers []*labels.Matcher) bool {
	for _, m := range matchers {
		if !m.Matches(lset.Get(m.Name)) {
			return false
		}
	}
	return true
}

// seriesSet is a storage.SeriesSet over a list of series.
type seriesSet struct {
	now  storage.Series
	rest []storage.Series
}

func (s *seriesSet) Next() bool {
	if len(s.rest) == 0 {
		return false
	}
	s.now, s.rest = s.rest[0], s.rest[1:]
	return true
}
func (s *seriesSet) At() storage.Series                { return s.now }
func (s *seriesSet) Err() error                        { return nil }
func (s *seriesSet) Warnings() annotations.Annotations { return nil }
