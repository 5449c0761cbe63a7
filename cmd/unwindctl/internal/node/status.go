package node

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// ask takes the directories from what the runtime answers to CRI's Status(verbose), and reports
// whether it told them. All containerd releases with CRI v1 do: "cniconfig" is what go-cni uses,
// "config" the CRI plugin's configuration with imports and defaults (containerd 1.6.20
// pkg/cri/server/status.go, 2.3 internal/cri/server/status.go; go-cni 1.1.14 cni.go GetConfig). The
// keys in them are no API; an answer without them tells nothing, as CRI-O's (cri-o
// server/runtime_status.go createRuntimeInfo).
//
// containerd 2 asks the network for its STATUS before it answers, as it does for each question of a
// kubelet.
func (r *Runtime) ask(root string) bool {
	if r.Socket == "" {
		return false
	}
	answer, err := call(context.Background(), filepath.Join(root, socketPath(r.Socket)), criTimeout,
		&cri.StatusRequest{Verbose: true}, cri.RuntimeServiceClient.Status)
	if err != nil {
		return false
	}
	var cni struct {
		PluginConfDir    string
		PluginDirs       []string
		PluginMaxConfNum int
	}
	_ = json.Unmarshal([]byte(answer.GetInfo()["cniconfig"]), &cni)
	if cni.PluginConfDir == "" || len(cni.PluginDirs) == 0 {
		return false
	}
	r.Config, r.ConfDir, r.BinDirs = r.Socket, cni.PluginConfDir, cni.PluginDirs
	r.MaxConfs, r.Problems = cni.PluginMaxConfNum, nil
	r.clean()
	var config struct { // which may hold secrets
		Containerd struct {
			Runtimes map[string]struct {
				ConfDir string `json:"cniConfDir"`
			} `json:"runtimes"`
		} `json:"containerd"`
	}
	_ = json.Unmarshal([]byte(answer.GetInfo()["config"]), &config)
	handlers := config.Containerd.Runtimes
	for _, handler := range slices.Sorted(maps.Keys(handlers)) {
		if dir := handlers[handler].ConfDir; dir != "" && filepath.Clean(dir) != r.ConfDir {
			r.Notes = append(r.Notes,
				fmt.Sprintf("pods of the runtime class handler %q have their conflists in %s and bypass unwind",
					handler, dir))
		}
	}
	return true
}
