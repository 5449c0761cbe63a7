package plugin

import (
	"io"

	"cni-unwind/plugin/undo"
)

// Plugin contains what the verbs need from their process.
type Plugin struct {
	undo.Env
	Stdout io.Writer
	// CacheDir is the directory of libcni's cache of results; "" means the one that all runtimes
	// use.
	CacheDir string
	// StartSweep starts the sweep behind a STATUS (see StartSweep). If it is nil, none starts.
	StartSweep func(conf []byte) (ended <-chan error, err error)
}
