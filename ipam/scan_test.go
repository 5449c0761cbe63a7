package ipam

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// BenchmarkScan reads a pool of 65,536 reservations.
func BenchmarkScan(b *testing.B) {
	pool := b.TempDir()
	for i := range 65536 {
		name := fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)
		if err := os.WriteFile(filepath.Join(pool, name), fmt.Appendf(nil, "%064x\r\neth0", i), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		start := time.Now()
		found, err := Scan(pool)
		if err != nil || len(found) != 65536 {
			b.Fatal(len(found), err)
		}
		b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/scan")
	}
}
