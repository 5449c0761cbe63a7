package delegate

import (
	"math"
	"os"
	"path/filepath"
	"testing"
)

// TestTasksLeft: the smallest room counts, of the cgroup and of those above it, in both versions.
func TestTasksLeft(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		self  string
		files map[string]string
		want  int
	}{
		{"no cgroups", "", nil, math.MaxInt},
		{"version 2, no limit", "0::/a.slice/b.service\n",
			map[string]string{"a.slice/b.service/pids.max": "max\n", "a.slice/b.service/pids.current": "9\n"}, math.MaxInt},
		{"version 2", "0::/a.slice/b.service\n",
			map[string]string{"a.slice/b.service/pids.max": "20\n", "a.slice/b.service/pids.current": "8\n"}, 12},
		{"version 2, above it", "0::/a.slice/b.service\n", map[string]string{
			"a.slice/b.service/pids.max": "2000\n", "a.slice/b.service/pids.current": "8\n",
			"a.slice/pids.max": "50\n", "a.slice/pids.current": "45\n"}, 5},
		{"version 2, a container's own root", "0::/\n", map[string]string{"pids.max": "30\n", "pids.current": "10\n"}, 20},
		{"version 1", "9:cpu,cpuacct:/x\n8:pids:/docker/c\n0::/\n",
			map[string]string{"pids/docker/c/pids.max": "100\n", "pids/docker/c/pids.current": "1\n"}, 99},
		{"version 1, the host's path in a container", "8:pids:/docker/c\n",
			map[string]string{"pids/pids.max": "100\n", "pids/pids.current": "40\n"}, 60},
		{"more than the limit", "0::/a\n", map[string]string{"a/pids.max": "10\n", "a/pids.current": "15\n"}, -5},
		{"a path past the root", "0::/../../a\n", map[string]string{"a/pids.max": "10\n", "a/pids.current": "5\n"}, 5},
		{"no lines of cgroups", "x\n:\n", nil, math.MaxInt},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			self := filepath.Join(root, "self")
			write := func(path, text string) {
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			write(self, tt.self)
			for name, text := range tt.files {
				write(filepath.Join(root, "cgroup", name), text)
			}
			if left := tasksLeft(self, filepath.Join(root, "cgroup")); left != tt.want {
				t.Errorf("%d tasks, want %d", left, tt.want)
			}
		})
	}
}
