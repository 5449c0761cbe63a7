module cni-unwind/plugin/e2e/ocicni

go 1.26

require (
	github.com/cri-o/ocicni v0.5.0
	github.com/sirupsen/logrus v1.9.3
)

require (
	github.com/containernetworking/cni v1.3.0 // indirect
	github.com/containernetworking/plugins v1.8.0 // indirect
	github.com/fsnotify/fsnotify v1.9.0 // indirect
	github.com/vishvananda/netlink v1.3.1 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	golang.org/x/sys v0.35.0 // indirect
)
